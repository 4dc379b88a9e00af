"""The linear layers of a step: weights cast together to the dtype of the products, and gradients.

Axes: R rows, I and O a layer's inputs and outputs, O' = O rounded up to 16 bytes of elements: a
matrix product of 16-bit numbers whose width is no multiple of 8 takes more than twice the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.column_sums import column_sums
from pruned_rnnt.ops.common.library import accumulator
from pruned_rnnt.ops.common.matrix_products import multiply_into


class Layer(NamedTuple):
    """weight (O,I) and bias (O,); padding: the bias of the outputs that pad O to O', or None for a
    layer that is not padded."""

    weight: Tensor
    bias: Tensor
    padding: float | None

    def padded_size(self, dtype: torch.dtype) -> int:
        size = self.weight.shape[0]
        return size if self.padding is None else padded_width(size, dtype)


def padded_width(size: int, dtype: torch.dtype) -> int:
    """O' of O outputs."""
    multiple = 16 // dtype.itemsize
    return -(-size // multiple) * multiple


def cast_layers(layers: Sequence[Layer], dtype: torch.dtype) -> list[Layer]:
    """weight (O',I) and bias (O',) of each layer in dtype, by few launches; not differentiable.

    Layers that need no change are returned as they are.
    """
    sizes = [layer.padded_size(dtype) for layer in layers]
    if all(
        layer.weight.dtype == layer.bias.dtype == dtype
        and layer.weight.shape[0] == size
        and layer.weight.is_contiguous()
        for layer, size in zip(layers, sizes, strict=True)
    ):
        return list(layers)
    shapes = [
        torch.Size(shape)
        for layer, size in zip(layers, sizes, strict=True)
        for shape in ((size, layer.weight.shape[1]), (size,))
    ]
    # Every tensor begins at a multiple of 16 elements, where the fast products want it.
    lengths = [-(-shape.numel() // 16) * 16 for shape in shapes]
    flat = torch.empty(sum(lengths), dtype=dtype, device=layers[0].weight.device)
    cast = [
        piece[: shape.numel()].view(shape)
        for piece, shape in zip(flat.split(lengths), shapes, strict=True)
    ]
    sources = [x for layer in layers for x in (layer.weight, layer.bias)]
    torch._foreach_copy_(
        [x[: source.shape[0]] for x, source in zip(cast, sources, strict=True)], sources
    )
    result = [Layer(*pair, None) for pair in zip(cast[::2], cast[1::2], strict=True)]
    for layer, (weight, bias, _) in zip(layers, result, strict=True):
        size = layer.weight.shape[0]
        if layer.padding is not None and weight.shape[0] > size:
            weight[size:] = 0
            bias[size:] = layer.padding
    return result


def weight_gradients(grad_RO: Tensor, x_RI: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
    """The gradients of a layer's weight and bias, in their own dtypes; grad may be padded."""
    size = layer.weight.shape[0]
    dtype = torch.promote_types(grad_RO.dtype, layer.weight.dtype)
    grad_weight = grad_RO.new_empty((grad_RO.shape[1], x_RI.shape[1]), dtype=dtype)
    multiply_into(grad_weight, grad_RO.t(), x_RI)
    grad_bias = grad_RO.new_empty((grad_RO.shape[1],), dtype=accumulator(grad_RO.dtype))
    column_sums(grad_RO, grad_bias, add=False)
    return grad_weight[:size].to(layer.weight.dtype), grad_bias[:size].to(layer.bias.dtype)
