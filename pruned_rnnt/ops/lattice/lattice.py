"""The mutual-information recursion: on the whole lattice, in k2's layout, with boundaries; and over
nodes that are kept as rows, of the whole lattice or a band, padded or packed.

The recurrence of every lattice op of this package, stated here once. Nodes (u,t); px(u,t) is the
log-prob of emitting symbol u+1 at (u,t), py(u,t) that of blank. Arcs lead from (u_b,t_b) to
(u_e,t_e), which is (0,0) to (U,T) without a boundary, and to no node outside that rectangle:

    blank        (u,t) -> (u,t+1), score py(u,t), t < t_e
    emit         regular      (u,t) -> (u+1,t),   score px(u,t); in column t_e as given (callers
                              put -inf there)
                 modified     (u,t) -> (u+1,t+1), score px(u,t)
                 constrained  as modified, with score px(u,t) + py(u+1,t)
                 rna          as modified, with px(u,t_e-1) = -inf: the last arc is a blank

Backwards, from beta(u_e,t_e) = 0, with -inf outside:

    beta(node)  = logadd(blank score + beta(its target), emit score + beta(its target))
    share(node) = exp(emit score + beta(its target) - beta(node))
    total       = log P = beta(u_b,t_b)

Forwards, from mass(u_b,t_b) = 1:

    gx(node)   = mass(node) * share(node)
    gy(node)   = mass(node) * (1 - share(node))
    mass(node) = the sum of gx and gy of the arcs that lead to it

gx = d log P / d px and gy = d log P / d py are the occupancies of the arcs; with `constrained`
gy(u,t) also has gx(u-1,t), for py is part of that emit. The shares of a node's two arcs sum to 1,
whatever rounding did to beta, so that the blanks of a frame (`regular`: each path leaves a frame by
one of them) have a mass of 1 however long the input is: exp(alpha + score + beta - total) would
lose digits with the size of total. beta and mass are kept in float64, or in another way that does
not round them at their own size.

logadd of two -inf is -inf. No path (also t_b >= t_e, or an end outside the lattice): total = -inf
and gx = gy = 0. A NaN makes total NaN, and the occupancies of its own utterance NaN or 0.
px is (N,U,T+1) for regular and (N,U,T) otherwise.

Over rows, paths lead from (0,0) to (U_n,T_n), with two changes:
    - px(t,u) + delay_penalty * ((T_n - 1)/2 - t) replaces px(t,u);
    - an arc to or from a node outside the band is -inf (`constrained`: the blank that belongs to an
      emit must be inside the band too).
A whole lattice is a band that starts at 0 and is U+1 wide.
Sources: Graves arXiv 1211.3711; Pruned RNN-T arXiv 2206.13236; the delay penalty is k2 issue 955.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pruned_rnnt.ops.common.autograd import (
    opaque_to_compile,
    refuses_second_derivative,
    scale,
    with_occupancies,
)
from pruned_rnnt.ops.common.library import CONSTRAINED, NEG_INF, REGULAR, RNA, Out, op
from pruned_rnnt.ops.common.row_geometry import LatticeRows


class LatticeSums(NamedTuple):
    """total (N,), gx and gy shaped like px and py."""

    total: Tensor
    gx: Tensor
    gy: Tensor


class _Arcs(NamedTuple):
    """Scores (K,N,U+1) of the arcs from step k to step k+1, one symbol up or at the same symbol."""

    emit: Tensor
    blank: Tensor


def _skewed(x: Tensor, diagonals: int) -> Tensor:
    """x (N,U+1,L) -> (diagonals,N,U+1) with [d,n,u] = x[n,u,d-u], -inf outside."""
    batch, rows, length = x.shape
    wide = pad(x, (0, diagonals - length + 1), value=NEG_INF)
    flat = wide.reshape(batch, rows * (diagonals + 1))[:, : rows * diagonals]
    return flat.reshape(batch, rows, diagonals).permute(2, 0, 1).contiguous()


def _unskewed(x: Tensor, length: int) -> Tensor:
    """The inverse of _skewed: x (diagonals,N,U+1) -> (N,U+1,length)."""
    diagonals, batch, rows = x.shape
    flat = pad(x.permute(1, 2, 0).reshape(batch, rows * diagonals), (0, rows))
    return flat.reshape(batch, rows, diagonals + 1)[:, :, :length]


def recursion_dtype(device: torch.device) -> torch.dtype:
    """float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def _shares(arcs: _Arcs, end: Tensor, begin: Tensor) -> tuple[Tensor, Tensor]:
    """share (K,N,U+1) of the emit among a node's arcs, and total (N,). end, begin (K+1,N,U+1) mark
    the node where all paths end and that where they begin."""
    wide = recursion_dtype(arcs.emit.device)
    steps = arcs.emit.shape[0]
    zero = torch.zeros((), dtype=wide, device=arcs.emit.device)
    beta = torch.where(end[steps], zero, NEG_INF)
    total = torch.where(begin[steps], beta, NEG_INF).amax(1)
    shares = []
    for k in range(steps - 1, -1, -1):
        emitted = arcs.emit[k] + pad(beta[:, 1:], (0, 1), value=NEG_INF)
        either = torch.logaddexp(emitted, arcs.blank[k] + beta)
        shares.append((emitted - either).exp().masked_fill(either == NEG_INF, 0))
        beta = torch.where(end[k], zero, either)
        total = torch.maximum(total, torch.where(begin[k], beta, NEG_INF).amax(1))
    shares.reverse()
    return torch.stack(shares), total


def _occupancies(share: Tensor, begin: Tensor, end: Tensor, dtype: torch.dtype) -> _Arcs:
    """Occupancies (K,N,U+1) of both arcs, 0 where begin is marked nowhere."""
    mass = begin[0].to(share.dtype)
    emitted, blanks = [], []
    for k, share_NU in enumerate(share):
        mass = mass.masked_fill(end[k], 0)
        emit, blank = mass * share_NU, mass * (1 - share_NU)
        emitted.append(emit.to(dtype))
        blanks.append(blank.to(dtype))
        mass = pad(emit[:, :-1], (1, 0)) + blank + begin[k + 1]
    return _Arcs(torch.stack(emitted), torch.stack(blanks))


def _full_lattice(px: Tensor, py: Tensor, boundary: Tensor, rnnt_type: int) -> LatticeSums:
    """The recurrence in plain torch. px (N,U+1,T+1) with -inf where nothing can be emitted,
    py (N,U+1,T+1) with -inf in the last column; boundary (N,4) int64."""
    frames, rows = px.shape[2] - 1, px.shape[1]
    u_begin, t_begin, u_end, t_end = (edge[:, None, None] for edge in boundary.unbind(1))
    u = torch.arange(rows, device=px.device)[None, :, None]
    t = torch.arange(frames + 1, device=px.device)[None, None, :]
    inside = (u >= u_begin) & (u <= u_end) & (t >= t_begin) & (t <= t_end)
    emits = inside & (u < u_end)
    blank = py.masked_fill(~(inside & (t < t_end)), NEG_INF)
    emit = px
    if rnnt_type == CONSTRAINED:
        # The sum of two scores of any size would lose the digits of the smaller one.
        emit = px.to(recursion_dtype(px.device)) + pad(blank[:, 1:], (0, 0, 0, 1), value=NEG_INF)
    if rnnt_type != REGULAR:
        emits = emits & (t < (t_end - 1 if rnnt_type == RNA else t_end))
    emit = emit.masked_fill(~emits, NEG_INF)
    # An end outside the lattice is no node: then there is no path.
    begin = inside & (u == u_begin) & (t == t_begin) & (t_begin < t_end)
    end = inside & (u == u_end) & (t == t_end)

    if rnnt_type == REGULAR:
        # Both arcs lead to the next anti-diagonal u + t.
        diagonals = frames + rows
        arcs = _Arcs(_skewed(emit, diagonals)[:-1], _skewed(blank, diagonals)[:-1])
        begin_K, end_K = (_skewed(x.to(px.dtype), diagonals) == 1 for x in (begin, end))
    else:
        # Both arcs lead to the next frame.
        arcs = _Arcs(*(x.permute(2, 0, 1)[:-1] for x in (emit, blank)))
        begin_K, end_K = (x.permute(2, 0, 1) for x in (begin, end))
    share, total = _shares(arcs, end_K, begin_K)
    gx, gy = _occupancies(share, begin_K & (total != NEG_INF)[:, None], end_K, px.dtype)
    if rnnt_type == REGULAR:
        gx, gy = (_unskewed(x, frames + 1) for x in (gx, gy))
    else:
        gx, gy = (pad(x.permute(1, 2, 0), (0, 1)) for x in (gx, gy))
    if rnnt_type == CONSTRAINED:
        gy = gy + pad(gx[:, :-1], (0, 0, 1, 0))
    return LatticeSums(total, gx, gy)


def split_workspace(px: Tensor, batch: int, columns: int, frames: int) -> Tensor:
    """Memory in which the CUDA kernels join the two halves of each utterance, for up to `columns`
    nodes of a frame and `frames` of all utterances; see csrc/cuda/lattice/halves.cuh."""
    return px.new_empty((batch * (5 * columns + 8) + 4 * frames,))


@op
def lattice(
    px: Tensor,
    py: Tensor,
    boundary: Tensor | None,
    rnnt_type: int,
    work: Out[Tensor],
    sums: Out[LatticeSums],
) -> None:
    """px (N,U,T+1) regular, (N,U,T) otherwise, py (N,U+1,T), both acc and contiguous; boundary
    (N,4) int32 [u_begin, t_begin, u_end, t_end] -> total (N), gx like px and gy like py, 0 outside
    the boundary. work: as split_workspace makes it, for U+1 columns and N T frames."""
    batch, rows, frames = py.shape
    if boundary is None:
        edges = torch.tensor([0, 0, rows - 1, frames], device=px.device).expand(batch, 4)
    else:
        edges = boundary.long()
    emit = pad(px, (0, frames + 1 - px.shape[2], 0, 1), value=NEG_INF)
    dense = _full_lattice(emit, pad(py, (0, 1), value=NEG_INF), edges, rnnt_type)
    sums.total.copy_(dense.total)
    sums.gx.copy_(dense.gx[:, :-1, : px.shape[2]])
    sums.gy.copy_(dense.gy[:, :, :-1])


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
    dense = _full_lattice(emit, blank, boundary, rnnt_type)
    sums.total.copy_(dense.total)
    for out, grid in ((sums.gx, dense.gx), (sums.gy, dense.gy)):
        out.zero_()
        out[valid] = grid.reshape(-1)[position]


class _MutualInformation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, px: Tensor, py: Tensor, boundary: Tensor | None, rnnt_type: int
    ) -> tuple[Tensor, ...]:
        sums = LatticeSums(px.new_empty(py.shape[:1]), torch.empty_like(px), torch.empty_like(py))
        batch, columns, frames = py.shape
        work = split_workspace(px, batch, columns, batch * frames)
        lattice(px, py, boundary, rnnt_type, work, sums)
        ctx.save_for_backward(sums.gx, sums.gy)
        return with_occupancies(ctx, *sums)

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad_total: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        occupancies = list(ctx.saved_tensors)
        grads = [torch.empty_like(x) for x in occupancies]
        scale(occupancies, grad_total.contiguous(), grads)
        return *grads, None, None


@opaque_to_compile
def mutual_information_sums(
    px: Tensor, py: Tensor, boundary: Tensor | None, rnnt_type: int
) -> LatticeSums:
    """total (N,), gx, gy of contiguous acc px, py; total is differentiable, gx and gy are not."""
    return LatticeSums(*_MutualInformation.apply(px, py, boundary, rnnt_type))  # type: ignore[no-untyped-call]
