"""The beams of TDT search: hypotheses that have landed on frames, and the states that they go on
from.

Axes: N batch, B beam, A frames ahead (from the current frame to the longest duration).

The origin of a hypothesis is the row that it was extended from: step * B + row, or -1 - row for a
row at the start. It is extended when the search reaches the frame that it landed on, several steps
later, so the states of the last steps are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.decode.search.states import Rows, choose_rows, take_rows


class Beam(NamedTuple):
    """Hypotheses (..., B) that have landed on a frame, or on several.

    score: of all their paths in the beam, -inf for none; hash: of the sequence; length: symbols.
    origin: the row that each was extended from, as step * B + row; -1 - row for a row at the start.
    symbol, duration: of the last arc (symbol -1 for blank); added: log-probability of the symbol
        or blank, without its duration and without scorers.
    """

    score: Tensor
    hash: Tensor
    length: Tensor
    origin: Tensor
    symbol: Tensor
    duration: Tensor
    added: Tensor

    def take(self, index: Tensor) -> Beam:
        """The rows with these indices into the last axis."""
        return Beam(*(x.gather(-1, index) for x in self))

    def where(self, mask: Tensor, other: Beam) -> Beam:
        """These hypotheses where the mask is True, else those of `other`."""
        return Beam(*(torch.where(mask, x, y) for x, y in zip(self, other, strict=True)))

    def flat(self) -> Beam:
        """The hypotheses of all frames of an utterance in one beam, (N, A * B)."""
        return Beam(*(x.flatten(1) for x in self))


class Start(NamedTuple):
    """What a search starts from.

    landed: (N, A, B) hypotheses on the frames from the first one on; of streams (N, A, 2B), the
        last B with the paths by blanks alone, which are what is left if the stream ends there. Row
        number n of the A * B or A * 2B of an utterance is the origin of these.
    states: of predictor and scorers before the last symbols of the hypotheses, one row for each.
    """

    landed: Beam
    states: list[Rows]

    def pack(self) -> Rows:
        """All tensors that the next frames depend on, with the axis N first."""
        size = len(self.landed.score)
        states = (x.unflatten(0, (size, -1)) for rows in self.states for x in rows)
        return self.landed.score, self.landed.hash, self.landed.length, self.landed.symbol, *states

    def unpack(self, packed: Rows) -> Start:
        """The inverse of `pack`, for states with as many tensors as these."""
        score, hashes, length, symbol, *others = packed
        rest = iter(x.flatten(0, 1) for x in others)
        origin = -1 - torch.arange(score[0].numel(), device=score.device).view_as(score[0])
        landed = empty_beams(score.shape, score.device)._replace(
            score=score.clone(),
            hash=hashes.clone(),
            length=length.clone(),
            origin=origin.expand_as(score).clone(),
            symbol=symbol.clone(),
        )
        return Start(landed, [tuple(next(rest) for _ in rows) for rows in self.states])


def empty_beams(shape: tuple[int, ...], device: torch.device) -> Beam:
    score = torch.full(shape, -torch.inf, device=device)
    zeros = [torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(5)]
    hashes, length, origin, symbol, duration = zeros
    return Beam(score, hashes, length, origin - 1, symbol - 1, duration, torch.zeros_like(score))


def shifted(landed: Beam) -> Beam:
    """The beams of the frames from the next one on."""
    size, _, width = landed.score.shape
    new = empty_beams((size, 1, width), landed.score.device)
    return Beam(*(torch.cat((x[:, 1:], y), dim=1) for x, y in zip(landed, new, strict=True)))


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
