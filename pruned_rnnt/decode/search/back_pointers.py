"""Back pointers of beam searches, from which the symbols of hypotheses are read at the end.

Axes: N batch, B beam, K best, T frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pruned_rnnt.decode.search.hypothesis import Hypothesis
from pruned_rnnt.decode.search.pending import Pending


@dataclass(frozen=True)
class BeamStep:
    """The origin of each row of the beam in a frame: parent row, symbol (-1: none), added score."""

    parent_NB: Tensor
    symbol_NB: Tensor
    added_NB: Tensor


def trace_hypotheses(
    kept_NK: Tensor, score_NK: Tensor, steps: Sequence[BeamStep]
) -> list[list[Hypothesis]]:
    """Follow the best rows of the last beam back to the first frame; results are on the CPU."""
    return pending_trace(kept_NK, score_NK, steps).result()


def pending_trace(
    kept_NK: Tensor, score_NK: Tensor, steps: Sequence[BeamStep]
) -> Pending[list[list[Hypothesis]]]:
    """The same, without waiting for the device."""
    symbols_NKT = torch.full((*kept_NK.shape, 1), -1)
    added_NKT = torch.zeros(*kept_NK.shape, 1)
    if steps:
        rows = [kept_NK]
        for step in reversed(steps[1:]):
            rows.append(step.parent_NB.gather(1, rows[-1]))
        row_NKT = torch.stack(rows[::-1], dim=-1)
        symbol_NBT = torch.stack([step.symbol_NB for step in steps], dim=-1)
        added_NBT = torch.stack([step.added_NB for step in steps], dim=-1)
        symbols_NKT = symbol_NBT.gather(1, row_NKT)
        added_NKT = added_NBT.gather(1, row_NKT)
    return Pending([score_NK, symbols_NKT, added_NKT], _hypotheses)


def _hypotheses(tensors: Sequence[Tensor]) -> list[list[Hypothesis]]:
    """The hypotheses of scores (N, K), and of symbols and the scores that they added (N, K, T)."""
    score_NK, symbols_NKT, added_NKT = tensors
    scores, symbols, added = score_NK.tolist(), symbols_NKT.numpy(), added_NKT.numpy()
    results: list[list[Hypothesis]] = []
    for n, scores_K in enumerate(scores):
        results.append([])
        for k, score in enumerate(scores_K):
            if score == -torch.inf:
                continue
            (frames,) = (symbols[n, k] >= 0).nonzero()
            results[n].append(
                Hypothesis(
                    symbols=tuple(symbols[n, k, frames].tolist()),
                    frames=tuple(frames.tolist()),
                    score=score,
                    symbol_scores=tuple(added[n, k, frames].tolist()),
                )
            )
    return results
