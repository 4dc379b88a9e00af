"""The linear layers of a step: weights cast to the dtype of the products, and gradients.

Axes: R rows, I and O a layer's inputs and outputs, O' = O rounded up to 16 bytes of elements: a
matrix product of 16-bit numbers whose width is no multiple of 8 takes more than twice the time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pruned_rnnt.ops.common.column_sums import column_sums
from pruned_rnnt.ops.common.library import accumulator
from pruned_rnnt.ops.common.matrix_products import multiply_into


class Layer(NamedTuple):
    """weight (O,I) and bias (O,); padding: the bias of the outputs that pad O to O', or None for a
    layer that is not padded."""

    weight: Tensor
    bias: Tensor
    padding: float | None


def padded_width(size: int, dtype: torch.dtype) -> int:
    """O' of O outputs."""
    multiple = 16 // dtype.itemsize
    return -(-size // multiple) * multiple


def cast_layer(layer: Layer, dtype: torch.dtype) -> Layer:
    """weight (O',I) and bias (O',) in dtype; not differentiable."""
    weight, bias = layer.weight.to(dtype).contiguous(), layer.bias.to(dtype)
    added = padded_width(len(bias), dtype) - len(bias)
    if layer.padding is not None and added > 0:
        weight, bias = pad(weight, (0, 0, 0, added)), pad(bias, (0, added), value=layer.padding)
    return Layer(weight, bias, None)


def weight_gradients(grad_RO: Tensor, x_RI: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
    """The gradients of a layer's weight and bias, in their own dtypes; grad may be padded."""
    size = layer.weight.shape[0]
    dtype = torch.promote_types(grad_RO.dtype, layer.weight.dtype)
    grad_weight = grad_RO.new_empty((grad_RO.shape[1], x_RI.shape[1]), dtype=dtype)
    multiply_into(grad_weight, grad_RO.t(), x_RI)
    grad_bias = grad_RO.new_empty((grad_RO.shape[1],), dtype=accumulator(grad_RO.dtype))
    column_sums(grad_RO, grad_bias, add=False)
    return grad_weight[:size].to(layer.weight.dtype), grad_bias[:size].to(layer.bias.dtype)
