"""A neural language model for beam search, on the device of the search.

Axes: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.decode.search.rows import Rows
from pruned_rnnt.model.language_model import SOS_EOS, LanguageModel


class NeuralScorer:
    """A `TokenScorer` whose state has the next symbols' log-probabilities and the model's state.

    Args:
        model: in evaluation mode, on the device of the search.
        scale: factor of the log-probabilities.
    """

    capturable = True

    def __init__(self, model: LanguageModel, scale: float) -> None:
        self._model = model
        self._scale = scale

    def start(self, rows: int, device: torch.device) -> Rows:
        first_R = torch.full((rows,), SOS_EOS, device=device)
        return self._step(first_R, self._model.start(rows))

    def scores(self, state: Rows) -> Tensor:
        return state[0]

    def advance(self, state: Rows, symbols_R: Tensor, emits_R: Tensor) -> Rows:
        if symbols_R.is_cuda:  # Selecting the rows that emit would synchronise with the device.
            return self._step(symbols_R, state[1:])
        (rows,) = emits_R.nonzero(as_tuple=True)
        if len(rows) == 0:
            return state
        grown = self._step(symbols_R[rows], tuple(x[rows] for x in state[1:]))
        return tuple(
            before.index_copy(0, rows, after) for before, after in zip(state, grown, strict=True)
        )

    def final(self, state: Rows) -> Tensor:
        return state[0][:, SOS_EOS]

    def _step(self, symbols_R: Tensor, state: Rows) -> Rows:
        log_probs_RV, state = self._model.step(symbols_R, state)
        return (self._scale * log_probs_RV, *state)
