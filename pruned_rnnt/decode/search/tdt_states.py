"""The states of predictor and scorers in the beam search with durations.

Axes: N batch, B beam; R = N * B rows.

A hypothesis is extended when the search reaches the frame that it landed on, several steps later.
So the search keeps the states of its last steps. The origin of a hypothesis is the row that it was
extended from, as step * B + row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pruned_rnnt.decode.search.rows import Rows, choose_rows, take_rows


class StepStates:
    """The states of predictor and scorers after each of the last steps of the search.

    Args:
        steps: number of steps that are kept.
        start: the states of the predictor and of each scorer at the start, R rows each.
    """

    def __init__(self, steps: int, start: Sequence[Rows]) -> None:
        self._steps = steps
        self._start = start
        self._kept = [tuple(x.new_zeros((steps, *x.shape)) for x in rows) for rows in start]

    def store(self, step: int, states: Sequence[Rows]) -> None:
        """Keep the states of a step in place of those of the oldest one."""
        for kept, rows in zip(self._kept, states, strict=True):
            for old, new in zip(kept, rows, strict=True):
                old[step % self._steps].copy_(new)

    def at(self, origin_NB: Tensor) -> list[Rows]:
        """The states of the rows step * B + row; those of the start for -1."""
        size, width = origin_NB.shape
        has_origin_R = (origin_NB >= 0).flatten()
        origin_NB = origin_NB.clamp(min=0)
        first_N1 = torch.arange(size, device=origin_NB.device)[:, None] * width
        step_NB = origin_NB // width % self._steps
        index_R = (step_NB * size * width + first_N1 + origin_NB % width).flatten()
        return [
            choose_rows(
                has_origin_R, take_rows(tuple(x.flatten(0, 1) for x in kept), index_R), start
            )
            for kept, start in zip(self._kept, self._start, strict=True)
        ]
