"""The plain recursion on utterances without a path, whose lengths nothing has read."""

from __future__ import annotations

import torch

from pruned_rnnt.ops.common.library import FALLBACKS
from pruned_rnnt.ops.common.row_geometry import LatticeRows
from pruned_rnnt.ops.lattice.band_lattice import band_lattice
from pruned_rnnt.ops.lattice.lattice import LatticeSums, split_workspace


def test_more_symbols_than_columns_have_no_path() -> None:
    """The first of two packed utterances has two symbols, it says, in a lattice of one column."""
    lengths = torch.tensor([2, 2], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    rows = LatticeRows(*lengths, None, torch.tensor([0, 6, 8]), 2, 1)
    px, py = torch.full((2, 8), -1.0)
    sums = LatticeSums(torch.zeros(2), torch.ones(8), torch.ones(8))
    work = split_workspace(px, 2, 1, 4)
    FALLBACKS["band_lattice"](px, py, *rows, 0, 0.0, work, *sums)
    plain = [x.clone() for x in sums]
    assert plain[0].tolist() == [-torch.inf, -2.0]
    assert not plain[1].any()
    assert plain[2].tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    band_lattice(px, py, rows, 0, 0.0, work, sums)
    for compiled, expected in zip(sums, plain, strict=True):
        torch.testing.assert_close(compiled, expected)
