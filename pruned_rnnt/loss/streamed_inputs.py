"""When and from what the simple loss of a large vocabulary is computed in tiles."""

from __future__ import annotations

from torch import Tensor, nn

from pruned_rnnt.ops.common.matrix_products import is_autocast_enabled, product_dtype
from pruned_rnnt.ops.common.plain_layers import plain_parameters
from pruned_rnnt.ops.simple import streamed_loss
from pruned_rnnt.ops.simple.streamed_loss import ProjectedInputs

# Of the narrowest dtype of am and lm.
_FEWEST_BYTES = 2


def may_exceed_stored_bytes(rows: int, vocabulary: int) -> bool:
    """Whether am and lm of the simple loss, so many rows together, can take more than
    MOST_STORED_BYTES."""
    return rows * vocabulary * _FEWEST_BYTES > streamed_loss.MOST_STORED_BYTES


def streamed_inputs(
    encoder_out: Tensor, predictor_out: Tensor, am_layer: nn.Module, lm_layer: nn.Module
) -> ProjectedInputs | None:
    """The inputs of the loss in tiles; None if am and lm take at most MOST_STORED_BYTES together,
    and for layers that must be called."""
    parameters = plain_parameters(
        (("simple_am_proj", am_layer), ("simple_lm_proj", lm_layer)), encoder_out.device
    )
    if isinstance(parameters, str):
        return None
    am_weight, am_bias, lm_weight, lm_bias = parameters
    rows = encoder_out.shape[:2].numel() + predictor_out.shape[:2].numel()
    stored = rows * am_weight.shape[0] * product_dtype(encoder_out, am_weight).itemsize
    if stored <= streamed_loss.MOST_STORED_BYTES:
        return None
    if not is_autocast_enabled(encoder_out):
        encoder_out = encoder_out.to(am_weight.dtype)
        predictor_out = predictor_out.to(lm_weight.dtype)
    return ProjectedInputs(encoder_out, am_weight, am_bias, predictor_out, lm_weight, lm_bias)
