"""The states of hypotheses in a search: tuples of tensors whose first axis is the hypothesis.

Axes: R rows (hypotheses of all utterances), D joiner width.

Predictors, language models and automata all keep their states in such tuples, so that a search can
select and reorder hypotheses in the same way for all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.model.transducer_model import TransducerModel

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
