"""The states of predictor and scorers in the beam search with durations.

Axes: N batch, B beam, K rows of an utterance at the start.

A hypothesis is extended when the search reaches the frame that it landed on, several steps later.
So the search keeps the states of its last steps. The origin of a hypothesis is the row that it was
extended from: step * B + row, or -1 - row for a row at the start.
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
        size, width: N and B.
        start: the states of the predictor and of each scorer at the start, N * K rows each.
    """

    def __init__(self, steps: int, size: int, width: int, start: Sequence[Rows]) -> None:
        self._steps, self._size, self._width = steps, size, width
        self._start = start
        shape = (steps, size * width)
        self._kept = [tuple(x.new_zeros((*shape, *x.shape[1:])) for x in rows) for rows in start]

    def store(self, step: int, states: Sequence[Rows]) -> None:
        """Keep the states of a step in place of those of the oldest one."""
        for kept, rows in zip(self._kept, states, strict=True):
            for old, new in zip(kept, rows, strict=True):
                old[step % self._steps].copy_(new)

    def at(self, origin_NB: Tensor) -> list[Rows]:
        """The states of rows, for any number of rows of each utterance."""
        from_step_R = (origin_NB >= 0).flatten()
        number_N1 = torch.arange(self._size, device=origin_NB.device)[:, None]
        step_NB = origin_NB.clamp(min=0) // self._width % self._steps
        row_NB = number_N1 * self._width + origin_NB.clamp(min=0) % self._width
        index_R = (step_NB * self._size * self._width + row_NB).flatten()
        rows_at_start = len(self._start[0][0]) // self._size
        start_R = (number_N1 * rows_at_start + (-1 - origin_NB).clamp(min=0)).flatten()
        return [
            choose_rows(
                from_step_R,
                take_rows(tuple(x.flatten(0, 1) for x in kept), index_R),
                take_rows(start, start_R),
            )
            for kept, start in zip(self._kept, self._start, strict=True)
        ]
