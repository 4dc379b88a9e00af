"""Which columns of the lattice to keep: from occupancies to a band start for each frame.

With k = S-1 for `regular` and k = 1 otherwise, and M = max(U_n+1-S, 0) the last window:
    1. score(s,t) for s = 0..M is the mass of the paths that pass frame t inside the window:
           regular, constrained   sum_{u=s}^{s+S-1} gy(t,u) - gx(t,s-1), gx(t,-1) = 0
           modified, rna          sum_{u=s}^{s+S-1} gy(t,u) + gx(t,u)
       A path takes one blank a frame in the first two types, and the mass that enters the window
       from below is on paths that the band cuts. In the others a frame emits a symbol instead of a
       blank, so that blanks alone say nothing about a frame that surely emits.
       s0(t) = the middle one of the s whose score is within 1e-5 of the largest (of two the
       first): windows that contain all the mass differ by rounding alone, and every device must
       choose the same; the middle one leaves paths room on both sides.
    2. s0(t) = M for t >= T_n - 1, so that the last symbol is reached.
    3. s1(t) = min over t' >= t of s0(t')                                  (monotone)
    4. s(t) = min(k t, max over t' >= t of (s1(t') - k (t' - t)))          (contiguous)
so that s(0) = 0, s(t) <= s(t+1) <= s(t) + k. With padded_search, step 1 looks at s = 0..U+1-S of
the padded U as k2 does, so that the bounds depend on the padding.

The exact variant maximises sum_t score(s(t),t) over t = 0..T_n-1 under the same constraints
(s(0) = 0, s(T_n-1) = M, steps of 0..k) by dynamic programming; of equal predecessors the largest
column is taken. For t >= T_n - 1, and where no band is feasible, s(t) = min(k t, M).
Source: arXiv 2206.13236; k2's get_rnnt_prune_ranges for the greedy rule.

In a TDT lattice a path visits a frame once at most in columns that it leaves by an arc of duration
above 0, after symbols of duration 0. With leave(t,u) and stay(t,u) the occupancies of these two
kinds of arcs, visits(t) = sum_u leave(t,u) is the probability that a path visits the frame, and

    leave(t,u) / visits(t)    stay(t,u) / visits(t)

play the part of blanks and emits in the greedy rule: `regular` with durations of 0, otherwise
`modified`, by which a band moves by one column a frame. Both rules leave a path of durations 0 (or
1) and 1. A frame that is hardly visited takes the numbers of the last frame before it that is:
there rounding would choose the window.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pruned_rnnt.ops.common.library import MODIFIED, NEG_INF, REGULAR, RNA, Out, op

TIE = 1e-5
# Least probability of a visit: the occupancies' rounding, divided by it, stays below TIE.
_LEAST_VISITS = 0.02


class OccupancyAndLengths(NamedTuple):
    """gx, gy (N,T,U+1) acc in row layout, and lengths (N) int32."""

    gx: Tensor
    gy: Tensor
    logit_lengths: Tensor
    target_lengths: Tensor


def _window_scores(nodes: OccupancyAndLengths, s_range: int, rnnt_type: int) -> Tensor:
    """score (N,T,W) for the windows s = 0 .. max(U+1-S, 0)."""
    gx, gy = nodes.gx, nodes.gy
    one_arc_a_frame = rnnt_type in (MODIFIED, RNA)
    windows = max(gy.shape[2] - s_range, 0) + 1
    mass = gx + gy if one_arc_a_frame else gy
    kept = pad(mass, (0, max(s_range - gy.shape[2], 0))).unfold(2, s_range, 1).sum(-1)
    return kept if one_arc_a_frame else kept - pad(gx, (1, 0))[:, :, :windows]


@op
def prune_bounds(
    nodes: OccupancyAndLengths,
    s_range: int,
    rnnt_type: int,
    padded_search: bool,
    start: Out[Tensor],
) -> None:
    """start (N,T) int32 by the greedy rule."""
    frames, device = nodes.gy.shape[1], nodes.gy.device
    step = s_range - 1 if rnnt_type == REGULAR else 1
    score = _window_scores(nodes, s_range, rnnt_type)
    last_N1 = (nodes.target_lengths.long()[:, None] + 1 - s_range).clamp_min(0)
    if not padded_search:
        s = torch.arange(score.shape[2], device=device)
        score = score.masked_fill((s > last_N1)[:, None, :], NEG_INF)
    tied = score >= score.amax(2, keepdim=True) - TIE
    rank = tied.cumsum(2, dtype=torch.int32)
    s0 = (rank == (rank[:, :, -1:] + 1) // 2).to(torch.uint8).argmax(2)
    t = torch.arange(frames, device=device)
    s0 = torch.where(t < nodes.logit_lengths[:, None] - 1, s0, last_N1)
    s1 = s0.flip(1).cummin(1).values.flip(1)
    reach = (s1 - step * t).flip(1).cummax(1).values.flip(1) + step * t
    start.copy_(torch.minimum(reach, step * t))


@op
def prune_bounds_exact(
    nodes: OccupancyAndLengths,
    s_range: int,
    rnnt_type: int,
    scratch: Out[Tensor],
    start: Out[Tensor],
) -> None:
    """start (N,T) int32 by dynamic programming. scratch (N,T,U+1) int32 is workspace, for the
    backpointers."""
    (batch, frames, _), device = nodes.gy.shape, nodes.gy.device
    step = s_range - 1 if rnnt_type == REGULAR else 1
    score = _window_scores(nodes, s_range, rnnt_type)
    windows = score.shape[2]
    last_N = (nodes.target_lengths.long() + 1 - s_range).clamp_min(0)
    s = torch.arange(windows, device=device)
    scratch.zero_()
    best = score[:, 0].masked_fill(s != 0, NEG_INF)
    for t in range(1, frames):
        # Column i of a window of k+1 predecessors is s - k + i.
        value, offset = pad(best, (step, 0), value=NEG_INF).unfold(1, step + 1, 1).flip(2).max(2)
        scratch[:, t, :windows] = (s - offset).clamp_min(0).int()
        best = value + score[:, t]
    frame_T = torch.arange(frames, device=device)
    bounds = torch.minimum(step * frame_T, last_N[:, None])
    feasible = step * (nodes.logit_lengths.long() - 1) >= last_N
    rows = torch.arange(batch, device=device)
    here = last_N
    for t in range(frames - 1, -1, -1):
        traced = feasible & (t < nodes.logit_lengths)
        bounds[:, t] = torch.where(traced, here, bounds[:, t])
        before = scratch[rows, t, here.clamp_max(windows - 1)].long()
        here = torch.where(traced, before, here)
    start.copy_(bounds)


def clipped_width(s_range: int, columns: int) -> int:
    """s_range without the columns behind the U+1 of a lattice, which add nothing to a band; as it
    is under torch.compile, which would compile once more for the comparison."""
    return s_range if torch.compiler.is_compiling() else min(s_range, max(columns, 2))


def choose_bounds(nodes: OccupancyAndLengths, s_range: int, rnnt_type: int, exact: bool) -> Tensor:
    """start (N,T) int32 by the greedy or the exact op, for contiguous occupancies."""
    start = nodes.gy.new_empty(nodes.gy.shape[:2], dtype=torch.int32)
    # The product of columns and frames is a 32-bit number.
    s_range = clipped_width(s_range, nodes.gy.shape[2])
    if exact:
        scratch = torch.empty_like(nodes.gy, dtype=torch.int32)
        prune_bounds_exact(nodes, s_range, rnnt_type, scratch, start)
    else:
        prune_bounds(nodes, s_range, rnnt_type, False, start)
    return start


def tdt_topology(durations: list[int]) -> int:
    return REGULAR if 0 in durations else MODIFIED


def tdt_bounds(
    occupancies: tuple[Tensor, Tensor, Tensor],
    lengths: tuple[Tensor, Tensor],
    *,
    s_range: int,
    durations: list[int],
    exact: bool,
) -> Tensor:
    """start (N,T) int32 for occupancies gx, gy, stay (N,T,U+1) of tdt_lattice.py and lengths (N) of
    logits and targets, int32."""
    gx, gy, stay = occupancies
    leave = gx + gy - stay
    visits = leave.sum(2)
    t = torch.arange(gx.shape[1], device=gx.device)
    # Frame 0 is always visited, unless there is no path.
    source = torch.where(visits >= _LEAST_VISITS, t, 0).cummax(1).values
    at = source[:, :, None].expand_as(leave)
    scale = visits.gather(1, source).clamp_min(_LEAST_VISITS).reciprocal()[:, :, None]
    left, stayed = (x.gather(1, at) * scale for x in (leave, stay))
    nodes = OccupancyAndLengths(stayed, left, *lengths)
    return choose_bounds(nodes, s_range, tdt_topology(durations), exact)
