"""The band of a TDT lattice, from its occupancies.

A path visits a frame once at most in columns that it leaves by an arc of duration above 0, after
symbols of duration 0. With leave(t,u) and stay(t,u) the occupancies of these two kinds of arcs,
visits(t) = sum_u leave(t,u) is the probability that a path visits the frame, and

    leave(t,u) / visits(t)    stay(t,u) / visits(t)

play the part of blanks and emits in the rule of prune_bounds.py: `regular` with durations of 0,
otherwise `modified`, by which a band moves by one column a frame. Both rules leave a path of
durations 0 (or 1) and 1. A frame that is hardly visited takes the numbers of the last frame before
it that is: there rounding would choose the window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import MODIFIED, REGULAR
from pruned_rnnt.ops.pruning.prune_bounds import OccupancyAndLengths, choose_bounds

# Least probability of a visit: the occupancies' rounding, divided by it, stays below the
# difference of scores that prune_bounds.py takes for a tie.
_LEAST_VISITS = 0.02


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
