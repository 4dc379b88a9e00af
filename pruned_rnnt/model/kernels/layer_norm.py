"""The backward pass of layer normalisation, in one pass over memory.

    z = (x - mean) * d,  d = 1 / deviation          out = z * weight + bias
    h = grad * weight
    d/dx      = d * (h - mean_E(h) - z * mean_E(h * z))
    d/dweight = sum over rows of grad * z,  d/dbias = sum over rows of grad

Axes: E channels; a row is one frame of one sequence. A program takes tiles of whole rows:

          E ->
    row   [ . . . . ]   all channels, in registers,
     |    [ . . . . ]   of BLOCK_R rows; program p takes every P-th tile

For sums over rows, each program writes the sum of its own rows, a part; see `sums_of_parts`.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import kernel
from pruned_rnnt.model.kernels.rows import load_channels, row_tiles, rows_of_turn

_TILE = 2048


@kernel("rows", "turns")
def _layer_norm_backward_kernel(
    x_ptr,
    weight_ptr,
    mean_ptr,
    inverse_deviation_ptr,
    grad_ptr,
    grad_x_ptr,
    of_weight_ptr,
    of_bias_ptr,
    rows,
    turns,
    E,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    channel = tl.arange(0, BLOCK_E)
    weight = load_channels(weight_ptr, channel, E)
    of_weight = tl.zeros((BLOCK_E,), dtype=tl.float32)
    of_bias = tl.zeros((BLOCK_E,), dtype=tl.float32)
    for turn in range(turns):
        row, inside = rows_of_turn(turn, rows, channel, E, BLOCK_R)
        place = row[:, None] * E + channel[None, :]
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_deviation_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
        z = tl.where(inside, (x - mean[:, None]) * inverse[:, None], 0.0)
        h = grad * weight
        mean_h = tl.sum(h, axis=1) / E
        mean_hz = tl.sum(h * z, axis=1) / E
        grad_x = inverse[:, None] * (h - mean_h[:, None] - z * mean_hz[:, None])
        tl.store(grad_x_ptr + place, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
        of_weight += tl.sum(grad * z, axis=0)
        of_bias += tl.sum(grad, axis=0)
    part = tl.program_id(0) * E + channel
    tl.store(of_weight_ptr + part, of_weight, mask=channel < E)
    tl.store(of_bias_ptr + part, of_bias, mask=channel < E)


def layer_norm_backward(
    x: Tensor, weight_E: Tensor, mean: Tensor, inverse_deviation: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (..., E) and, as parts (P, E) in float32, of weight and bias.

    Args:
        x, grad: (..., E), contiguous.
        mean, inverse_deviation: of each row of x, contiguous.
    """
    width = x.size(-1)
    rows = x.numel() // width
    grad_x = torch.empty_like(x)
    tiles = row_tiles(rows, width, _TILE)
    of_weight = x.new_empty((tiles.parts, width), dtype=torch.float32)
    of_bias = torch.empty_like(of_weight)
    _layer_norm_backward_kernel(
        (tiles.parts,),
        x,
        weight_E,
        mean,
        inverse_deviation,
        grad,
        grad_x,
        of_weight,
        of_bias,
        rows,
        tiles.turns,
        width,
        tiles.rows,
        tiles.channels,
    )
    return grad_x, of_weight, of_bias
