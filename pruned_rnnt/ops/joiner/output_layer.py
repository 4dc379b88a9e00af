"""The output layer of the joiner as its matrix products take it.

V' is V rounded up to a multiple of 8: 16-bit matrix products of other widths take more than twice
the time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from pruned_rnnt.ops.common.library import Out, op

_WIDTH_MULTIPLE = 8


def padded_width(vocabulary: int) -> int:
    """V' of V."""
    return vocabulary + -vocabulary % _WIDTH_MULTIPLE


def padded_output(
    weight_VD: Tensor, bias_V: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """weight and bias (None: zeros) in that dtype with rows of zeros up to V' (differentiable)."""
    vocabulary = weight_VD.shape[0]
    missing = padded_width(vocabulary) - vocabulary
    weight_VD = weight_VD.to(dtype)
    bias_V = weight_VD.new_zeros(vocabulary) if bias_V is None else bias_V.to(dtype)
    if missing:
        weight_VD, bias_V = pad(weight_VD, (0, 0, 0, missing)), pad(bias_V, (0, missing))
    return weight_VD.contiguous(), bias_V.contiguous()


@op
def output_layer(
    weight: Tensor, bias: Tensor, padded_weight: Out[Tensor], padded_bias: Out[Tensor]
) -> None:
    """weight (V,D) and bias (V), contiguous and of one floating dtype -> padded_weight (V',D) and
    padded_bias (V') of any: the same with rows of zeros."""
    for x, padded in ((weight, padded_weight), (bias, padded_bias)):
        padded[: len(x)] = x
        padded[len(x) :] = 0


def converted_output(weight: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """padded_output in one launch, and without a gradient."""
    rows = padded_width(weight.shape[0])
    if weight.dtype != bias.dtype or not (weight.is_contiguous() and bias.is_contiguous()):
        return padded_output(weight, bias, dtype)
    # Parameters may begin anywhere in a larger buffer; the products read 16 bytes at a time.
    if rows == weight.shape[0] and weight.dtype == dtype and weight.data_ptr() % 16 == 0:
        return weight, bias
    padded_weight = weight.new_empty(rows, weight.shape[1], dtype=dtype)
    padded_bias = bias.new_empty(rows, dtype=dtype)
    output_layer(weight, bias, padded_weight, padded_bias)
    return padded_weight, padded_bias
