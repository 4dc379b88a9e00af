"""The beams of TDT search: hypotheses that have landed on frames, and the states that they go on
from.

Axes: N batch, B beam, A frames ahead (from the current frame to the longest duration), W beams of a
frame: the best hypotheses, and in streams those of paths whose last arc is a blank, which are what
is left if the stream ends there. V vocabulary.

The origin of a hypothesis is the row that it was extended from: step * B + row, or -1 - row for a
row at the start. It is extended when the search reaches the frame that it landed on, several steps
later, so the states of the last steps are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.decode.search.states import Rows, take_rows


class Beam(NamedTuple):
    """Hypotheses (..., B) that have landed on a frame, or on several.

    The time of a search goes into the number of calls, not into numbers, so what moves together is
    one tensor.

    score: of all their paths in the beam, -inf for none.
    rest: (4, ..., B) int64: hash of the sequence; number of symbols; last arc, which is
        origin * V + symbol or blank; bits of the float32 log-probability of this symbol or blank,
        without its duration and without scorers.
    """

    score: Tensor
    rest: Tensor

    @property
    def arc(self) -> Tensor:
        return self.rest[2]

    @property
    def added(self) -> Tensor:
        return self.rest[3].int().view(torch.float32)

    def take(self, index: Tensor) -> Beam:
        """The rows with these indices into the last axis."""
        return Beam(self.score.gather(-1, index), self.rest_at(index))

    def rest_at(self, index: Tensor) -> Tensor:
        """`rest` of the rows with these indices into the last axis."""
        return self.rest.gather(-1, index.expand(len(self.rest), *index.shape))

    def where(self, mask: Tensor, other: Beam) -> Beam:
        """These hypotheses where the mask is True, else those of `other`."""
        return Beam(*(torch.where(mask, x, y) for x, y in zip(self, other, strict=True)))

    def flat(self) -> Beam:
        """The hypotheses of all frames of an utterance in one beam, (N, A * W * B)."""
        return Beam(self.score.flatten(1), self.rest.flatten(2))


class Start(NamedTuple):
    """What a search starts from.

    landed: (N, A, W, B) hypotheses on the frames from the first one on. Row number n of the
        A * W * B of an utterance is the origin of these.
    states: of predictor and scorers before the last symbols of the hypotheses, one row for each.
    """

    landed: Beam
    states: list[Rows]

    def pack(self, vocab_size: int) -> Rows:
        """All tensors that the next frames depend on, with the axis N first."""
        size = len(self.landed.score)
        states = (x.unflatten(0, (size, -1)) for rows in self.states for x in rows)
        hashes, length, arc, _ = self.landed.rest
        return self.landed.score, hashes, length, arc % vocab_size, *states

    def unpack(self, packed: Rows, vocab_size: int) -> Start:
        """The inverse of `pack`, for states with as many tensors as these."""
        score, hashes, length, symbol, *others = packed
        rest = iter(x.flatten(0, 1) for x in others)
        origin = -1 - torch.arange(score[0].numel(), device=score.device).view_as(score[0])
        arc = origin * vocab_size + symbol
        landed = Beam(score.clone(), torch.stack((hashes, length, arc, torch.zeros_like(arc))))
        return Start(landed, [tuple(next(rest) for _ in rows) for rows in self.states])


def empty_beams(shape: tuple[int, ...], device: torch.device, no_arc: int) -> Beam:
    """Beams without hypotheses; no_arc: the arc of their rows, a blank of a row at the start."""
    score = torch.full(shape, -torch.inf, device=device)
    rest = torch.zeros((4, *shape), dtype=torch.int64, device=device)
    rest[2] = no_arc
    return Beam(score, rest)


def shifted(landed: Beam, empty: Beam) -> Beam:
    """The beams of the frames from the next one on; empty: (N, 1, W, B) for the last of these."""
    return Beam(
        torch.cat((landed.score[:, 1:], empty.score), dim=1),
        torch.cat((landed.rest[:, :, 1:], empty.rest), dim=2),
    )


class StepStates:
    """The states of predictor and scorers after each of the last steps of the search.

    Args:
        steps: number of steps that are kept. Those at the start are kept for as many, too.
        size, width: N and B.
        start: the states of the predictor and of each scorer at the start, N * K rows each.
    """

    def __init__(self, steps: int, size: int, width: int, start: Sequence[Rows]) -> None:
        self._size, self._width = size, width
        rows_at_start = len(start[0][0]) // size
        # The rows of an utterance are a ring, in which row -1 is before row 0.
        self._ring = steps * width + rows_at_start
        self._kept = []
        for rows in start:
            kept = tuple(x.new_zeros((size, self._ring, *x.shape[1:])) for x in rows)
            for old, new in zip(kept, rows, strict=True):
                old[:, steps * width :] = new.unflatten(0, (size, -1)).flip(1)
            self._kept.append(kept)
        first = torch.arange(size, device=start[0][0].device) * self._ring
        self._first_N1 = first[:, None]

    def store(self, step: int, states: Sequence[Rows]) -> None:
        """Keep the states of a step in place of those of the oldest one."""
        begin = step * self._width % self._ring
        for kept, rows in zip(self._kept, states, strict=True):
            for old, new in zip(kept, rows, strict=True):
                own = old[:, begin : begin + self._width]
                own.copy_(new.view_as(own))

    def at(self, origin_NB: Tensor) -> list[Rows]:
        """The states of rows, for any number of rows of each utterance."""
        index_R = (origin_NB % self._ring + self._first_N1).flatten()
        return [take_rows(tuple(x.flatten(0, 1) for x in kept), index_R) for kept in self._kept]
