"""The recursion over lattice nodes kept as rows: full or band, padded or packed.

Axes: N batch, T frames, U symbols, S columns kept a frame, R rows (row_geometry.py).

The recurrence is that of lattice.py from (0,0) to (U_n,T_n), with two changes:
    - px(t,u) + delay_penalty * ((T_n - 1)/2 - t) stands in place of px(t,u);
    - an arc to or from a node outside the band is -inf (`constrained`: the blank that belongs to an
      emit must be inside the band too).
A full lattice is a band that starts at 0 and is U+1 wide. The delay penalty is k2 issue 955.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import define
from pruned_rnnt.ops.common.row_geometry import nodes_of_rows
from pruned_rnnt.ops.lattice.lattice import full_lattice

NEG_INF = float("-inf")


def _band_lattice(
    px: Tensor,
    py: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    start: Tensor | None,
    row_splits: Tensor | None,
    frames: int,
    columns: int,
    rnnt_type: int,
    delay_penalty: float,
    work: Tensor,
    total: Tensor,
    gx: Tensor,
    gy: Tensor,
) -> None:
    # The band is spread over the (U+1,T+1) lattice: memory O(N T U), which the compiled kernels
    # do not need.
    batch = logit_lengths.shape[0]
    if row_splits is not None:
        frames = min(frames, int(logit_lengths.max()))
    nodes = nodes_of_rows(
        logit_lengths, target_lengths, start, row_splits, frames, columns, 0, px.shape[0]
    )
    valid = nodes.valid
    # One column above the band: the last symbol may be what leaves it.
    rows = columns if start is None else 2 + int(nodes.u.masked_fill(~valid, 0).max())
    where = ((nodes.n * rows + nodes.u) * (frames + 1) + nodes.t)[valid]
    logit_lengths_N = logit_lengths.to(px.dtype)
    delay = delay_penalty * ((logit_lengths_N[nodes.n] - 1) / 2 - nodes.t)
    spread = px.new_full((2, batch * rows * (frames + 1)), NEG_INF)
    spread[0, where] = (px + delay)[valid]
    spread[1, where] = py[valid]
    emit, stay = spread.view(2, batch, rows, frames + 1)
    zeros = torch.zeros_like(logit_lengths)
    boundary = torch.stack([zeros, zeros, target_lengths, logit_lengths], dim=1).long()
    sums = full_lattice(emit, stay, boundary, rnnt_type)
    total.copy_(sums.total)
    for out, dense in ((gx, sums.gx), (gy, sums.gy)):
        out.zero_()
        out[valid] = dense.reshape(-1)[where]


# px, py (R) acc as log_probs writes them; lengths (N) int32. -> total (N) = log P, gx, gy (R). No
# path, T_n outside 1..T or (U_n, T_n) outside the band: total = -inf, gx = gy = 0, and nothing is
# read outside the rows. Invalid nodes: gx = gy = 0. work: as cut_memory makes it, for S and T.
band_lattice = define(
    "band_lattice(Tensor px, Tensor py, Tensor logit_lengths, Tensor target_lengths, "
    "Tensor? start, Tensor? row_splits, int T, int S, int rnnt_type, float delay_penalty, "
    "Tensor(a!) work, Tensor(b!) total, Tensor(c!) gx, Tensor(d!) gy) -> ()",
    _band_lattice,
)
