"""The recursion over lattice nodes kept as rows: full or band, padded or packed.

The recurrence is that of lattice.py from (0,0) to (U_n,T_n), with two changes:
    - px(t,u) + delay_penalty * ((T_n - 1)/2 - t) replaces px(t,u);
    - an arc to or from a node outside the band is -inf (`constrained`: the blank that belongs to an
      emit must be inside the band too).
A full lattice is a band that starts at 0 and is U+1 wide. The delay penalty is k2 issue 955.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import NEG_INF, Out, op
from pruned_rnnt.ops.common.row_geometry import LatticeRows
from pruned_rnnt.ops.lattice.lattice import LatticeSums, full_lattice


@op
def band_lattice(
    px: Tensor,
    py: Tensor,
    rows: LatticeRows,
    rnnt_type: int,
    delay_penalty: float,
    work: Out[Tensor],
    sums: Out[LatticeSums],
) -> None:
    """px, py (R) acc as log_probs writes them -> total (N) = log P, gx, gy (R).

    No path, T_n outside 1..T or (U_n, T_n) outside the band: total = -inf, gx = gy = 0, and nothing
    is read outside the rows. Invalid nodes: gx = gy = 0. work: as split_workspace makes it, for S
    columns and N T frames, or R packed ones if these are fewer.
    """
    # The band is spread over the (U+1,T+1) lattice: memory O(N T U), which the compiled kernels
    # do not need.
    if rows.row_splits is not None:
        rows = rows._replace(frames=min(rows.frames, int(rows.logit_lengths.max())))
    frames, lengths_N = rows.frames, rows.logit_lengths
    batch = lengths_N.shape[0]
    n, t, u, valid = rows.nodes(0, px.shape[0])
    # One column above the band, because the last symbol may leave it.
    columns = rows.columns if rows.start is None else 2 + int(u.masked_fill(~valid, 0).max())
    # More symbols than columns, of lengths that nothing has read, have no path.
    valid = valid & (rows.target_lengths < columns)[n]
    symbols_N = rows.target_lengths.clamp(max=columns - 1)
    position = ((n * columns + u) * (frames + 1) + t)[valid]
    delay = delay_penalty * ((lengths_N.to(px.dtype)[n] - 1) / 2 - t)
    spread = px.new_full((2, batch * columns * (frames + 1)), NEG_INF)
    spread[0, position] = (px + delay)[valid]
    spread[1, position] = py[valid]
    emit, blank = spread.view(2, batch, columns, frames + 1)
    zeros = torch.zeros_like(lengths_N)
    boundary = torch.stack([zeros, zeros, symbols_N, lengths_N], dim=1).long()
    dense = full_lattice(emit, blank, boundary, rnnt_type)
    sums.total.copy_(dense.total)
    for out, grid in ((sums.gx, dense.gx), (sums.gy, dense.gy)):
        out.zero_()
        out[valid] = grid.reshape(-1)[position]
