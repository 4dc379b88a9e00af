"""What the ops that search need of a model: joiners of linear layers and stateless predictors.

Axes: C symbols of a context, P predictor width, D joiner width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional


class SearchModel(NamedTuple):
    """Predictor, joiner and options of a search; all tensors contiguous.

    tables: (C,V+1,P), what each symbol adds to the predictor's output at each place of the context,
        the last row for -1; with C > 1, a ReLU follows the sum.
    decoder_weight (D,P), decoder_bias (D), output_weight (V,D), output_bias (V): of the joiner.
    silent: (V) bool, symbols that are never emitted: impossible in a beam, and as blank when
        greedy search finds them the most probable.
    activation: a value of ACTIVATIONS; hat: log-probabilities as `joint_log_probs`.
    """

    tables: Tensor
    decoder_weight: Tensor
    decoder_bias: Tensor
    output_weight: Tensor
    output_bias: Tensor
    silent: Tensor
    blank: int
    activation: int
    hat: bool


def predicted(context: Tensor, model: SearchModel) -> Tensor:
    """The projected output (..., D) of the predictor after contexts (..., C)."""
    tables = model.tables
    summed = tables[0][context[..., 0]]
    for place in range(1, tables.shape[0]):
        summed = summed + tables[place][context[..., place]]
    output = summed.relu() if tables.shape[0] > 1 else summed
    return functional.linear(output, model.decoder_weight, model.decoder_bias)
