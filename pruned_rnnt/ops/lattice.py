"""The mutual-information recursion on the whole lattice, in k2's layout, with boundaries.

Axes: N batch, T frames, U symbols.

The recurrence of every lattice op of this package, stated here once. Nodes (u,t); px(u,t) is the
log-prob of emitting symbol u+1 at (u,t), py(u,t) that of blank. From (u_b,t_b) to (u_e,t_e), which
is (0,0) to (U,T) without a boundary:

    alpha(u_b,t_b) = 0; anything outside u_b..u_e x t_b..t_e is -inf
    regular      alpha(u,t) = logadd(alpha(u-1,t)   + px(u-1,t),   alpha(u,t-1) + py(u,t-1))
    modified     alpha(u,t) = logadd(alpha(u-1,t-1) + px(u-1,t-1), alpha(u,t-1) + py(u,t-1))
    constrained  as modified, with px(u,t) + py(u+1,t) in place of px(u,t)
    rna          as modified, with px(u,t_e-1) = -inf: the last transition is a blank
    total = log P = alpha(u_e,t_e)

beta is the same from the end, beta(u_e,t_e) = 0, so that alpha + beta is the log-probability of
all paths through a node. Occupancies gx = d log P / d px and gy = d log P / d py are
    gx(u,t) = exp(alpha(u,t) + px(u,t) + beta(target of the emit) - total)
    gy(u,t) = exp(alpha(u,t) + py(u,t) + beta(u,t+1) - total)
and with `constrained` gy(u,t) also has gx(u-1,t), for py is part of that emit.
logadd of two -inf is -inf. No path (also t_b >= t_e, or an end outside the lattice): total = -inf
and gx = gy = 0. A NaN makes total NaN, and the
occupancies of its own utterance NaN or 0.
px is (N,U,T+1) for regular, where column t_e is used as given (callers put -inf there), and
(N,U,T) otherwise. Sources: Graves arXiv 1211.3711; Pruned RNN-T arXiv 2206.13236.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pruned_rnnt.ops._library import CONSTRAINED, REGULAR, RNA, define

NEG_INF = float("-inf")


class LatticeSums(NamedTuple):
    """alpha, beta (N,U+1,T+1), total (N,), gx and gy shaped like px and py."""

    alpha: Tensor
    beta: Tensor
    total: Tensor
    gx: Tensor
    gy: Tensor


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


def _shift(x: Tensor, by: int) -> Tensor:
    """x (N,U+1) moved by one symbol, up (1) or down (-1); -inf moves in."""
    return pad(x, (by, -by), value=NEG_INF)


def _sweep(emit: Tensor, stay: Tensor, begin: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """alpha and beta (K+1,N,U+1) over K steps. emit[k], stay[k] (N,U+1) lead from step k to
    step k+1, one symbol up or at the same symbol; begin and end (K+1,N,U+1) are 0 at the first
    and at the last node and -inf elsewhere."""
    steps = emit.shape[0]
    alpha = [begin[0]]
    for k in range(steps):
        after = torch.logaddexp(_shift(alpha[-1] + emit[k], 1), alpha[-1] + stay[k])
        alpha.append(torch.where(begin[k + 1] == 0, begin[k + 1], after))
    beta = [end[steps]]
    for k in range(steps - 1, -1, -1):
        before = torch.logaddexp(_shift(beta[-1], -1) + emit[k], beta[-1] + stay[k])
        beta.append(torch.where(end[k] == 0, end[k], before))
    beta.reverse()
    return torch.stack(alpha), torch.stack(beta)


def full_lattice(px: Tensor, py: Tensor, boundary: Tensor, rnnt_type: int) -> LatticeSums:
    """The recurrence in plain torch. px (N,U+1,T+1) with -inf where nothing can be emitted,
    py (N,U+1,T+1) with -inf in the last column; boundary (N,4) int64."""
    frames, rows = px.shape[2] - 1, px.shape[1]
    u_begin, t_begin, u_end, t_end = (edge[:, None, None] for edge in boundary.unbind(1))
    u = torch.arange(rows, device=px.device)[None, :, None]
    t = torch.arange(frames + 1, device=px.device)[None, None, :]
    inside = (u >= u_begin) & (u <= u_end) & (t >= t_begin) & (t <= t_end)
    emits = inside & (u < u_end)
    stay = py.masked_fill(~(inside & (t < t_end)), NEG_INF)
    emit = px
    if rnnt_type == CONSTRAINED:
        emit = emit + pad(stay[:, 1:], (0, 0, 0, 1), value=NEG_INF)
    if rnnt_type != REGULAR:
        emits = emits & (t < (t_end - 1 if rnnt_type == RNA else t_end))
    emit = emit.masked_fill(~emits, NEG_INF)
    zero = torch.zeros((), dtype=px.dtype, device=px.device)
    begin = torch.where((u == u_begin) & (t == t_begin), zero, NEG_INF)
    end = torch.where((u == u_end) & (t == t_end), zero, NEG_INF)

    if rnnt_type == REGULAR:
        # Both arcs lead to the next anti-diagonal u + t.
        diagonals = frames + rows
        emit_K, stay_K = _skewed(emit, diagonals)[:-1], _skewed(stay, diagonals)[:-1]
        alpha, beta = _sweep(emit_K, stay_K, _skewed(begin, diagonals), _skewed(end, diagonals))
        alpha, beta = _unskewed(alpha, frames + 1), _unskewed(beta, frames + 1)
        reached = pad(beta[:, 1:], (0, 0, 0, 1), value=NEG_INF)
    else:
        # Both arcs lead to the next frame.
        by_frame = [x.permute(2, 0, 1) for x in (emit, stay, begin, end)]
        alpha, beta = _sweep(by_frame[0][:-1], by_frame[1][:-1], by_frame[2], by_frame[3])
        alpha, beta = alpha.permute(1, 2, 0), beta.permute(1, 2, 0)
        reached = pad(beta[:, 1:, 1:], (0, 1, 0, 1), value=NEG_INF)
    alpha = alpha.masked_fill(~inside, NEG_INF)
    beta = beta.masked_fill(~inside, NEG_INF)
    # -inf also where the end lies outside the lattice, or no transition leads to it.
    total = torch.where((u == u_end) & (t == t_end), alpha, NEG_INF).amax((1, 2))
    total = total.masked_fill((boundary[:, 1] >= boundary[:, 3]), NEG_INF)

    lost = (total == NEG_INF)[:, None, None]
    scale = total.masked_fill(total == NEG_INF, 0)[:, None, None]
    gx = (alpha + emit + reached - scale).exp().masked_fill(lost, 0)
    gy = (alpha + stay + pad(beta[:, :, 1:], (0, 1), value=NEG_INF) - scale).exp()
    gy = gy.masked_fill(lost, 0)
    if rnnt_type == CONSTRAINED:
        gy = gy + pad(gx[:, :-1], (0, 0, 1, 0))
    return LatticeSums(alpha, beta, total, gx, gy)


def _lattice(
    px: Tensor,
    py: Tensor,
    boundary: Tensor | None,
    rnnt_type: int,
    alpha: Tensor,
    beta: Tensor,
    total: Tensor,
    gx: Tensor,
    gy: Tensor,
) -> None:
    batch, rows, frames = py.shape
    if boundary is None:
        edges = torch.tensor([0, 0, rows - 1, frames], device=px.device).expand(batch, 4)
    else:
        edges = boundary.long()
    emit = pad(px, (0, frames + 1 - px.shape[2], 0, 1), value=NEG_INF)
    sums = full_lattice(emit, pad(py, (0, 1), value=NEG_INF), edges, rnnt_type)
    alpha.copy_(sums.alpha)
    beta.copy_(sums.beta)
    total.copy_(sums.total)
    gx.copy_(sums.gx[:, :-1, : px.shape[2]])
    gy.copy_(sums.gy[:, :, :-1])


# px (N,U,T+1) regular, (N,U,T) otherwise, py (N,U+1,T), both acc and contiguous; boundary (N,4)
# int32 [u_begin, t_begin, u_end, t_end]. -> alpha, beta (N,U+1,T+1), total (N), gx like px and gy
# like py; gx and gy are 0, alpha and beta -inf outside the boundary.
lattice = define(
    "lattice(Tensor px, Tensor py, Tensor? boundary, int rnnt_type, Tensor(a!) alpha, "
    "Tensor(b!) beta, Tensor(c!) total, Tensor(d!) gx, Tensor(e!) gy) -> ()",
    _lattice,
)
