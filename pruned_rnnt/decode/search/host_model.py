"""The models that the compiled searches on the CPU take.

Axes: V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.loss.joiner import changed_part
from pruned_rnnt.model.predictor import StatelessPredictor
from pruned_rnnt.model.transducer_model import TransducerModel
from pruned_rnnt.ops.common.plain_layers import plain_parameters
from pruned_rnnt.ops.joiner.joiner_rows import ACTIVATIONS
from pruned_rnnt.ops.search.search_model import SearchModel


def host_model(model: TransducerModel, silent_V: Tensor) -> SearchModel | None:
    """What the ops need of a model; None if they cannot search it: the model must be on the CPU in
    float32, with a stateless predictor and plain linear layers in the joiner."""
    joiner, predictor = model.joiner, model.predictor
    layers = (("decoder_proj", joiner.decoder_proj), ("output_linear", joiner.output_linear))
    parameters = plain_parameters(layers, torch.device("cpu"))
    if isinstance(parameters, str) or changed_part(joiner) is not None:
        return None
    if not isinstance(predictor, StatelessPredictor):
        return None
    tables = predictor.context_tables()
    if any(x.dtype != torch.float32 for x in (tables, *parameters)):
        return None
    decoder_weight, decoder_bias, output_weight, output_bias = (
        x.detach().contiguous() for x in parameters
    )
    return SearchModel(
        tables,
        decoder_weight,
        decoder_bias,
        output_weight,
        output_bias,
        silent_V,
        predictor.blank,
        ACTIVATIONS[joiner.activation],
        model.loss_config.hat,
    )
