"""Searches that continue from chunk to chunk of a stream, and the paths that they find.

Axes: N streams, C encoder frames of a chunk, E encoder width.

The device keeps what a search needs for the next chunk, tensors with the streams on axis 0. The
sequences themselves are on the host: a chunk continues paths of the chunk before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.decode.search.hypothesis import Hypothesis, Pending
from pruned_rnnt.decode.search.rows import Rows


class Continuation(NamedTuple):
    """A path of a stream after a chunk.

    row: its place among the paths that the next chunk continues.
    origin: the row of the path before the chunk that it continues.
    part: what the chunk added, with frames from the start of the chunk; its score is that of the
        whole path.
    """

    row: int
    origin: int
    part: Hypothesis


class ChunkSearch(NamedTuple):
    """The state after a chunk, and the paths of each stream, best first.

    head_NC: (N, C) the symbol that the CTC head prefers in each frame; from a `StreamDecoder` with
        `with_head` alone, of a model that has one.
    """

    state: Rows
    found: Pending[list[list[Continuation]]]
    head_NC: Tensor | None = None


class StreamSearch(ABC):
    """A search that can stop after any chunk and continue from its state."""

    @abstractmethod
    def start_streams(self, streams: int, device: torch.device) -> Rows:
        """The state at the start of streams, which have one path, without symbols, in row 0."""

    @abstractmethod
    def search_chunk(self, encoded_NCE: Tensor, lengths_N: Tensor, state: Rows) -> ChunkSearch:
        """Search the next frames of streams.

        Args:
            lengths_N: integer, on the device of `encoded_NCE`; a stream with fewer than C ends.
            state: before these frames, from `start_streams` or from the last call.
        """


class Arc(NamedTuple):
    """A symbol, the frame of the stream at which it was emitted, its log-probability, and the
    frames by which it advanced, None for models without durations."""

    symbol: int
    frame: int
    score: float
    duration: int | None


class StreamPath:
    """The best path of a stream, and how much of it can still change.

    Attributes:
        best: the best path.
        settled: number of its arcs that all paths of the search begin with.
        stable: number of its symbols that all paths begin with, maybe at other frames.
        frame: number of encoder frames that were searched.
        score: log-probability of the path since the start of the search.
    """

    def __init__(self) -> None:
        self.frame = 0
        self.restart()

    def restart(self) -> None:
        """Forget all paths, as a search that starts again does."""
        self.best: list[Arc] = []
        self.settled = self.stable = 0
        self.score = 0.0
        # What follows the settled arcs, by the row of each path.
        self._rests: dict[int, list[Arc]] = {0: []}

    def extend(self, found: Sequence[Continuation], frames: int) -> None:
        """Add the paths after the next `frames` frames, best first."""
        if found:
            rests = {
                path.row: [*self._rests[path.origin], *_arcs(path.part, self.frame)]
                for path in found
            }
            best = rests[found[0].row]
            common = _in_common(rests.values(), lambda arc: arc)
            self.best[self.settled :] = best
            self.stable = self.settled + _in_common(rests.values(), lambda arc: arc.symbol)
            self.settled += common
            self._rests = {row: rest[common:] for row, rest in rests.items()}
            self.score = found[0].part.score
        self.frame += frames

    def drop(self, count: int) -> list[Arc]:
        """Remove the first arcs, which must be settled, and return them."""
        assert count <= self.settled
        dropped, self.best = self.best[:count], self.best[count:]
        self.settled -= count
        self.stable -= count
        return dropped

    def hypothesis(self) -> Hypothesis:
        """The best path."""
        return Hypothesis(
            symbols=tuple(arc.symbol for arc in self.best),
            frames=tuple(arc.frame for arc in self.best),
            score=self.score,
            symbol_scores=tuple(arc.score for arc in self.best),
            durations=tuple(arc.duration for arc in self.best if arc.duration is not None),
        )


def _arcs(part: Hypothesis, begin: int) -> list[Arc]:
    durations = part.durations or (None,) * len(part.symbols)
    columns = (part.symbols, part.frames, part.symbol_scores, durations)
    return [
        Arc(symbol, begin + frame, score, duration)
        for symbol, frame, score, duration in zip(*columns, strict=True)
    ]


def _in_common(paths: Collection[Sequence[Arc]], key: Callable[[Arc], object]) -> int:
    """The number of arcs at the beginning whose keys are the same in all paths."""
    columns = zip(*paths, strict=False)
    return sum(1 for _ in takewhile(lambda arcs: len({key(arc) for arc in arcs}) == 1, columns))
