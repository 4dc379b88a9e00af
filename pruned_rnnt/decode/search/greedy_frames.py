"""The result of greedy searches, by frame, and its hypotheses.

Axes: N batch, T encoder frames, M maximum symbols per frame, S = T * M.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.decode.search.hypothesis import Hypothesis
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
    most = parts[0].symbols_NTM.size(2)
    scores = torch.stack([part.score_N for part in parts]).sum(dim=0).tolist()
    symbols_NS, symbol_scores_NS = (
        torch.cat(found, dim=1).flatten(1).cpu().numpy()
        for found in (
            [part.symbols_NTM for part in parts],
            [part.scores_NTM for part in parts],
        )
    )
    durations_NS = None
    durations = [part.durations_NTM for part in parts if part.durations_NTM is not None]
    if durations:
        durations_NS = torch.cat(durations, dim=1).flatten(1).cpu().numpy()
    hypotheses = []
    for n, score in enumerate(scores):
        (steps,) = (symbols_NS[n] >= 0).nonzero()
        hypotheses.append(
            Hypothesis(
                symbols=tuple(symbols_NS[n, steps].tolist()),
                frames=tuple((steps // most).tolist()),
                score=score,
                symbol_scores=tuple(symbol_scores_NS[n, steps].tolist()),
                durations=() if durations_NS is None else tuple(durations_NS[n, steps].tolist()),
            )
        )
    return hypotheses


class SearchByFrames(ABC):
    """A search that can stop after any frame and continue from its state."""

    @torch.inference_mode()
    def __call__(self, encoded_NTE: Tensor, lengths: Tensor) -> list[Hypothesis]:
        """Decode whole utterances.

        Args:
            encoded_NTE: (N, T, E) output of `model.encode`.
            lengths: (N,) integer encoder frames.
        """
        start = self.start(encoded_NTE.size(0), encoded_NTE.device)
        found = self.frames(encoded_NTE, lengths.to(encoded_NTE.device), start)
        return hypotheses_of_frames([found])

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
