"""The result of greedy searches, by frame, and its hypotheses.

Axes: N batch, T encoder frames, M maximum symbols per frame, S = T * M.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pruned_rnnt.decode.search.interface import (
    ChunkSearch,
    Continuation,
    DeviceSearch,
    Hypothesis,
    Pending,
    StreamSearch,
)
from pruned_rnnt.decode.search.states import Rows


class GreedyFrames(NamedTuple):
    """The result of greedy search for some frames of N streams.

    symbols_NTM: int64, -1 for no symbol.
    scores_NTM: float32, log-probability of the symbol or blank; 0 beyond the end.
    state: of the search, after these frames; empty for searches of whole utterances only.
    durations_NTM: int64, frames by which the symbol or blank advanced; None for models without
        durations.
    duration_scores_NTM: float32, the log-probabilities of the durations, or None.
    """

    symbols_NTM: Tensor
    scores_NTM: Tensor
    state: Rows = ()
    durations_NTM: Tensor | None = None
    duration_scores_NTM: Tensor | None = None

    @property
    def score_N(self) -> Tensor:
        """Log-probability of the path through the frames."""
        total_N = self.scores_NTM.sum(dim=(1, 2))
        if self.duration_scores_NTM is not None:
            total_N = total_N + self.duration_scores_NTM.sum(dim=(1, 2))
        return total_N


def pending_hypotheses(found: GreedyFrames) -> Pending[list[Hypothesis]]:
    """The hypotheses of streams, whose frames count from the first one; does not wait for the
    device."""
    return _pending(found, found.score_N)


def _pending(found: GreedyFrames, score_N: Tensor) -> Pending[list[Hypothesis]]:
    tensors = [score_N, found.symbols_NTM, found.scores_NTM]
    if found.durations_NTM is not None:
        tensors.append(found.durations_NTM)
    return Pending(tensors, _hypotheses)


def _hypotheses(tensors: Sequence[Tensor]) -> list[Hypothesis]:
    """The hypotheses of scores (N,), and symbols, their scores and durations (N, T, M)."""
    score_N, symbols_NTM, *of_symbols = tensors
    batch, _, most = symbols_NTM.shape
    symbols_NS = symbols_NTM.flatten(1).numpy()
    emits_NS = symbols_NS >= 0
    # All symbols of the batch, one utterance after the other.
    _, steps = emits_NS.nonzero()
    symbols = symbols_NS[emits_NS].tolist()
    frames = (steps // most).tolist()
    symbol_scores, *durations = (each.flatten(1).numpy()[emits_NS].tolist() for each in of_symbols)
    ends = np.cumsum(emits_NS.sum(axis=1)).tolist()
    return [
        Hypothesis(
            symbols=tuple(symbols[begin:end]),
            frames=tuple(frames[begin:end]),
            score=score,
            symbol_scores=tuple(symbol_scores[begin:end]),
            durations=tuple(durations[0][begin:end]) if durations else (),
        )
        for score, begin, end in zip(score_N.tolist(), [0, *ends][:batch], ends, strict=True)
    ]


class SearchByFrames(DeviceSearch[list[Hypothesis]], StreamSearch):
    """A search that can stop after any frame and continue from its state.

    The state of its streams has the log-probabilities of their paths, (N,), at the end.
    """

    @torch.inference_mode()
    def launch(self, encoded_NTE: Tensor, lengths: Tensor) -> Pending[list[Hypothesis]]:
        start = self.start(encoded_NTE.size(0), encoded_NTE.device)
        found = self.frames(encoded_NTE, lengths.to(encoded_NTE.device), start)
        return pending_hypotheses(found)

    def start_streams(self, streams: int, device: torch.device) -> Rows:
        return *self.start(streams, device), torch.zeros(streams, device=device)

    @torch.inference_mode()
    def search_chunk(self, encoded_NCE: Tensor, lengths_N: Tensor, state: Rows) -> ChunkSearch:
        found = self.frames(encoded_NCE, lengths_N, state[:-1])
        score_N = state[-1] + found.score_N
        parts = _pending(found, score_N)
        return ChunkSearch(
            (*found.state, score_N),
            parts.map(lambda hypotheses: [[Continuation(0, 0, part)] for part in hypotheses]),
        )

    @abstractmethod
    def start(self, streams: int, device: torch.device) -> Rows:
        """The state before the first frame."""

    @abstractmethod
    def frames(self, encoded_NTE: Tensor, lengths_N: Tensor, state: Rows) -> GreedyFrames:
        """Decode the next frames of streams.

        Args:
            lengths_N: integer, on the device of `encoded_NTE`.
            state: before these frames, from `start` or from the last call.
        """
