"""band_lattice on utterances without a path, on scores whose exponentials overflow, and on bands
wider than a block has threads, or that go back.
"""

from __future__ import annotations

import pytest
import torch

from pruned_rnnt.ops.common.library import FALLBACKS, RNNT_TYPES
from pruned_rnnt.ops.common.row_geometry import LatticeRows
from pruned_rnnt.ops.lattice.lattice import LatticeSums, band_lattice, split_workspace
from tests.ops.native_batches import NEG_INF, batch_of, log_softmax_like, random_start

BATCH = batch_of([67, 30, 12], [21, 29, 3], 5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rnnt_type", RNNT_TYPES.values(), ids=list(RNNT_TYPES))
@pytest.mark.parametrize("columns", [4, None])
@pytest.mark.parametrize(("scale", "mask"), [(1.0, None), (1.0, -1e8), (1e3, None), (1e5, None)])
def test_sums_of_scores_of_any_size(device, rnnt_type, columns, scale, mask) -> None:
    torch.manual_seed(7)
    start = None if columns is None else random_start(BATCH, columns)
    columns = columns or BATCH.symbols + 1
    rows = BATCH.size * BATCH.frames * columns
    px, py = scale * log_softmax_like(2, rows, dtype=torch.float32)
    if mask is not None:
        px[5::9] = py[7::11] = mask
    geometry = (BATCH.logit_lengths, BATCH.target_lengths, start, None, BATCH.frames, columns)

    def results(function, where: str, dtype: torch.dtype) -> list[torch.Tensor]:
        sizes = (BATCH.size, rows, rows)
        outputs = [torch.zeros(size, dtype=dtype, device=where) for size in sizes]
        moved = [x.to(where) if isinstance(x, torch.Tensor) else x for x in geometry]
        arcs = px.to(where, dtype), py.to(where, dtype)
        work = split_workspace(arcs[0], BATCH.size, columns, BATCH.size * BATCH.frames)
        function(*arcs, *moved, rnnt_type, 0.0, work, *outputs)
        return [x.cpu().double() for x in outputs]

    want = results(FALLBACKS["band_lattice"], "cpu", torch.float64)
    got = results(torch.ops.pruned_rnnt.band_lattice, device, torch.float32)
    assert want[0].isfinite().any()
    for left, right in zip(got, want, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-4)


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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rnnt_type", RNNT_TYPES.values(), ids=list(RNNT_TYPES))
@pytest.mark.parametrize(("columns", "back"), [(512, 0), (1100, 0), (600, 2), (4, 2), (33, 1)])
def test_every_topology_and_width_of_band(device, columns, back, rnnt_type) -> None:
    torch.manual_seed(columns)
    symbols = [columns + 30, 8, columns - 1]
    batch = batch_of([14, 9, columns // 8 + 3], symbols, 4)
    start = random_start(batch, columns)
    start[:, 3:6] -= back
    if back:
        start[:, 7] += 1
    start.clamp_(min=0)
    rows = start.numel() * columns
    px, py = log_softmax_like(2, rows, dtype=torch.float64)
    px[torch.rand(rows) < 0.05] = NEG_INF
    inputs = (px, py, batch.logit_lengths, batch.target_lengths, start, None, batch.frames, columns)

    def outputs(where: str) -> list[torch.Tensor]:
        return [torch.full((n,), 7.0, dtype=px.dtype, device=where) for n in (3, rows, rows)]

    work = split_workspace(px, batch.size, columns, batch.size * batch.frames)
    want = outputs("cpu")
    FALLBACKS["band_lattice"](*inputs, rnnt_type, 0.1, work, *want)
    got = outputs(device)
    moved = [x.to(device) if isinstance(x, torch.Tensor) else x for x in inputs]
    torch.ops.pruned_rnnt.band_lattice(*moved, rnnt_type, 0.1, work.to(device), *got)
    for left, right in zip(got, want, strict=True):
        torch.testing.assert_close(left.cpu(), right, rtol=1e-9, atol=1e-10)
