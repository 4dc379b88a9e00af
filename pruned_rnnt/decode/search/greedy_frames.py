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

from pruned_rnnt.decode.search.hypothesis import Hypothesis
from pruned_rnnt.decode.search.pending import DeviceSearch, Pending
from pruned_rnnt.decode.search.rows import Rows


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


def hypotheses_of_frames(parts: Sequence[GreedyFrames]) -> list[Hypothesis]:
    """The hypotheses of streams whose frames were decoded in parts, in order.

    Frames count from the first one of the first part. Copies the results from the device.
    """
    return pending_hypotheses(parts).result()


def pending_hypotheses(parts: Sequence[GreedyFrames]) -> Pending[list[Hypothesis]]:
    """The same, without waiting for the device."""
    score_N = torch.stack([part.score_N for part in parts]).sum(dim=0)
    symbols_NTM = torch.cat([part.symbols_NTM for part in parts], dim=1)
    scores_NTM = torch.cat([part.scores_NTM for part in parts], dim=1)
    durations = [part.durations_NTM for part in parts if part.durations_NTM is not None]
    tensors = [score_N, symbols_NTM, scores_NTM]
    return Pending([*tensors, torch.cat(durations, dim=1)] if durations else tensors, _hypotheses)


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
        for score, begin, end in zip(score_N.tolist(), [0, *ends[: batch - 1]], ends, strict=True)
    ]


class SearchByFrames(DeviceSearch[list[Hypothesis]]):
    """A search that can stop after any frame and continue from its state."""

    @torch.inference_mode()
    def launch(self, encoded_NTE: Tensor, lengths: Tensor) -> Pending[list[Hypothesis]]:
        start = self.start(encoded_NTE.size(0), encoded_NTE.device)
        found = self.frames(encoded_NTE, lengths.to(encoded_NTE.device), start)
        return pending_hypotheses([found])

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
