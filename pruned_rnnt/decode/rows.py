"""What searches remember beside their scores: tuples of tensors whose first axis is the hypothesis.

Axes: R rows (hypotheses of all utterances), C context size, D joiner width.

One kind of tuple serves predictors with and without recurrence, language models and automata, so
that a search picks, keeps and reorders hypotheses without knowing what they remember.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.model.transducer import TransducerModel

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
    context_RC = model.predictor.start_context(rows, device)
    return _projected(model, context_RC), context_RC


def grow_predictor(model: TransducerModel, rows: Rows, symbols_R: Tensor) -> Rows:
    """The predictor after one more symbol in every row."""
    _, context_RC = rows
    context_RC = torch.cat((context_RC[:, 1:], symbols_R[:, None]), dim=1)
    return _projected(model, context_RC), context_RC


def _projected(model: TransducerModel, context_RC: Tensor) -> Tensor:
    projected_RD: Tensor = model.joiner.decoder_proj(model.predictor(context_RC)[:, 0])
    return projected_RD
