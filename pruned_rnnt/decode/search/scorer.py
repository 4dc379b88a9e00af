"""The interface of scores that beam searches add to the model's, and functions of several scorers.

Axes: N batch, B beam, R = N * B rows (hypotheses of all utterances), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pruned_rnnt.decode.search.rows import Rows, choose_rows


class TokenScorer(Protocol):
    """Scores of next symbols from a state of each hypothesis; scales are included.

    capturable: `scores` and `advance` read nothing from a CUDA device, so that a search may capture
        them in a CUDA graph.
    """

    capturable: bool

    def start(self, rows: int, device: torch.device) -> Rows:
        """The state of empty hypotheses."""

    def scores(self, state: Rows) -> Tensor:
        """(R, V) float32 to add to the score of each next symbol; that of blank is ignored."""

    def advance(self, state: Rows, symbols_R: Tensor, emits_R: Tensor) -> Rows:
        """The state after one more symbol.

        Where `emits_R` is False, the symbol may be blank, and the search keeps the old state
        instead of the returned one.
        """

    def final(self, state: Rows) -> Tensor:
        """(R,) float32 to add to the score of each hypothesis at its end."""


def advance_scorers(
    scorers: Sequence[TokenScorer], states: Sequence[Rows], symbols_R: Tensor, emits_R: Tensor
) -> tuple[Rows, ...]:
    """The states of all scorers after one more symbol in the rows where `emits_R` is True."""
    return tuple(
        choose_rows(emits_R, scorer.advance(state, symbols_R, emits_R), state)
        for scorer, state in zip(scorers, states, strict=True)
    )


def add_final_scores(
    score_NB: Tensor, scorers: Sequence[TokenScorer], states: Sequence[Rows]
) -> Tensor:
    """(N, B): the scores of hypotheses with those that the scorers give for their end."""
    for scorer, state in zip(scorers, states, strict=True):
        score_NB = score_NB + scorer.final(state).view_as(score_NB)
    return score_NB
