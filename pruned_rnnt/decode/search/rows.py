"""What searches remember beside their scores: tuples of tensors whose first axis is the hypothesis.

Axes: R rows (hypotheses of all utterances), D joiner width.

One kind of tuple serves predictors with and without recurrence, language models and automata, so
that a search picks, keeps and reorders hypotheses without knowing what they remember.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.model.transducer_model import TransducerModel

Rows = tuple[Tensor, ...]


def choose_rows(mask_R: Tensor, new: Rows, old: Rows) -> Rows:
    """Rows of `new` where the mask is true, of `old` elsewhere."""
    return tuple(
        torch.where(mask_R.view(-1, *[1] * (before.dim() - 1)), after, before)
        for after, before in zip(new, old, strict=True)
    )


def take_rows(rows: Rows, index_R: Tensor) -> Rows:
    """Rows in another order, with repetitions."""
    return tuple(tensor.index_select(0, index_R) for tensor in rows)


def start_predictor(model: TransducerModel, rows: int, device: torch.device) -> Rows:
    """The predictor before the first symbol: its projected output (R, D), then its state."""
    output_RP, state = model.predictor.start(rows, device)
    return model.joiner.decoder_proj(output_RP), *state


def grow_predictor(model: TransducerModel, rows: Rows, symbols_R: Tensor) -> Rows:
    """The predictor after one more symbol in every row."""
    output_RP, state = model.predictor.step(symbols_R, rows[1:])
    return model.joiner.decoder_proj(output_RP), *state
