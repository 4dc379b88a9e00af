"""The states of hypotheses in a search, and how the predictor and other models advance them.

Axes: N batch, B beam, R = N * B rows (hypotheses of all utterances), D joiner width, V vocabulary.

A state is a tuple of tensors whose first axis is the hypothesis: predictors, language models and
automata all keep theirs so, and a search selects and reorders hypotheses in the same way for all of
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pruned_rnnt.model.speech_model import TransducerModel

Rows = tuple[Tensor, ...]


def choose_rows(mask_R: Tensor, new: Rows, old: Rows) -> Rows:
    """Rows of `new` where the mask is True, of `old` elsewhere."""
    return tuple(
        torch.where(mask_R.view(-1, *[1] * (before.dim() - 1)), after, before)
        for after, before in zip(new, old, strict=True)
    )


def take_rows(rows: Rows, index_R: Tensor) -> Rows:
    """The rows with these indices, which may repeat."""
    return tuple(tensor.index_select(0, index_R) for tensor in rows)


def start_predictor(model: TransducerModel, rows: int, device: torch.device) -> Rows:
    """The predictor before the first symbol: its projected output (R, D), then its state."""
    output_RP, state = model.predictor.start(rows, device)
    return model.joiner.decoder_proj(output_RP), *state


def advance_predictor(
    model: TransducerModel, rows: Rows, symbols_R: Tensor, emits_R: Tensor
) -> Rows:
    """The predictor after one more symbol in the rows where `emits_R` is True."""
    output_RP, state = model.predictor.step(symbols_R, rows[1:])
    return choose_rows(emits_R, (model.joiner.decoder_proj(output_RP), *state), rows)


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
