"""When and from what the simple loss of a large vocabulary is computed in tiles."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pruned_rnnt.ops.common.matrix_products import product_dtype
from pruned_rnnt.ops.simple import streamed_loss
from pruned_rnnt.ops.simple.streamed_loss import ProjectedInputs
from pruned_rnnt.ops.step.step_plan import plain_parameters


def exceeds_stored_bytes(encoder_out: Tensor, predictor_out: Tensor, weight: Tensor) -> bool:
    """Whether am and lm of the simple loss would together take more than MOST_STORED_BYTES, for
    weight (V,E) of am's layer."""
    rows = encoder_out.shape[:2].numel() + predictor_out.shape[:2].numel()
    itemsize = product_dtype(encoder_out, weight).itemsize
    return rows * weight.shape[0] * itemsize > streamed_loss.MOST_STORED_BYTES


def streamed_inputs(
    encoder_out: Tensor, predictor_out: Tensor, am_layer: nn.Linear, lm_layer: nn.Linear
) -> ProjectedInputs | None:
    """The inputs of the loss in tiles; None for layers that are not plain."""
    parameters = plain_parameters((am_layer, lm_layer), encoder_out.device)
    if parameters is None:
        return None
    am_weight, am_bias, lm_weight, lm_bias = parameters
    if not torch.is_autocast_enabled(encoder_out.device.type):
        encoder_out = encoder_out.to(am_weight.dtype)
        predictor_out = predictor_out.to(lm_weight.dtype)
    return ProjectedInputs(encoder_out, am_weight, am_bias, predictor_out, lm_weight, lm_bias)
