"""Lattice nodes as rows: the one layout of everything that has a row for each node.

Rows are t-major; the column j (or u) runs fastest. (start, row_splits, T, S) select one of four
geometries; T_n and U_n are the lengths of utterance n:
    padded full  start None,  row_splits None:   u = j,  row = (n T + t) S + j,  S = U+1
    padded band  start (N,T), row_splits None:   u = start(n,t) + j,  row = (n T + t) S + j
    packed full  start None,  row_splits given:  u = j,  row = row_splits[n] + t (U_n+1) + j
    packed band  start (N,T), row_splits given:  u = start(n,t) + j,  row = row_splits[n] + t S + j
start is int32, row_splits (N+1) int64 with row_splits[n] the first row of utterance n. For packed
full rows T may be any upper bound of the lengths. A node is valid iff t < T_n and u <= U_n.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pruned_rnnt.ops.common.library import Out, op


class Nodes(NamedTuple):
    """Which node each row is: int64 n, t, u and a mask of the valid ones."""

    n: Tensor
    t: Tensor
    u: Tensor
    valid: Tensor


class LatticeRows(NamedTuple):
    """Lengths (N,) int32, and the geometry of the rows with T frames and S columns."""

    logit_lengths: Tensor
    target_lengths: Tensor
    start: Tensor | None
    row_splits: Tensor | None
    frames: int
    columns: int

    def nodes(self, row_begin: int, count: int) -> Nodes:
        """Nodes of rows row_begin .. row_begin + count; indices of invalid ones may be outside."""
        device = self.logit_lengths.device
        return self.nodes_of(torch.arange(row_begin, row_begin + count, device=device))

    def nodes_of(self, rows: Tensor) -> Nodes:
        """Nodes of these rows, int64; indices of invalid ones may be outside."""
        frames, columns, row_splits = self.frames, self.columns, self.row_splits
        if row_splits is None:
            n = rows // (frames * columns)
            within = rows - n * (frames * columns)
            width: Tensor | int = columns
        else:
            n = torch.searchsorted(row_splits, rows, right=True) - 1
            n = n.clamp(0, self.logit_lengths.shape[0] - 1)
            within = rows - row_splits[n]
            width = columns if self.start is not None else self.target_lengths[n].long() + 1
        t = within // width
        u = within - t * width
        if self.start is not None:
            u = u + self.start[n, t.clamp(max=frames - 1)]
        valid = (t < self.logit_lengths[n]) & (u <= self.target_lengths[n]) & (u >= 0)
        return Nodes(n, t, u, valid)

    def symbols_after(self, nodes: Nodes, targets: Tensor, vocabulary: int, blank: int) -> Tensor:
        """The symbol (R) emitted from each node, -1 where none can be."""
        if targets.shape[1] == 0:
            return torch.full_like(nodes.u, -1)
        y = targets[nodes.n, nodes.u.clamp(0, targets.shape[1] - 1)].long()
        usable = nodes.valid & (nodes.u < self.target_lengths[nodes.n])
        return torch.where(usable & (y >= 0) & (y < vocabulary) & (y != blank), y, -1)


def packed_splits(logit_lengths: Tensor, target_lengths: Tensor, columns: int | None) -> Tensor:
    """row_splits (N+1) int64 of packed rows, of a band of that many columns or the full lattice. A
    length below 0, which no loss has a path for, counts as 0: splits never decrease."""
    frames_N, symbols_N = (x.long().clamp_min(0) for x in (logit_lengths, target_lengths))
    rows_N = frames_N * (symbols_N + 1 if columns is None else columns)
    return pad(rows_N.cumsum(0), (1, 0))


@op
def fitting_splits(
    logit_lengths: Tensor,
    target_lengths: Tensor,
    frames: int,
    columns: int,
    row_splits: Out[Tensor],
) -> None:
    """row_splits (N+1) int64 of a packed whole lattice, from lengths (N) int32; without rows for
    utterances that exceed the padding, T frames and S columns (their loss is inf)."""
    fits = (logit_lengths <= frames) & (logit_lengths >= 0)
    fits &= (target_lengths < columns) & (target_lengths >= 0)
    row_splits.copy_(packed_splits(logit_lengths * fits, target_lengths * fits, None))
