"""Layer normalisation and BiasNorm: one pass over memory, and one backward.

Layer normalisation, perhaps with the SiLU after it:

    z = (x - mean) * d,  d = 1 / deviation          y = z * weight + bias
    out = y, or y * sigmoid(y)
    h = grad * weight; grad is that of y: that of out, times s * (1 + y * (1 - s)), s = sigmoid(y)
    d/dx      = d * (h - mean_E(h) - z * mean_E(h * z))
    d/dweight = sum over rows of grad * z,  d/dbias = sum over rows of grad

BiasNorm:

    out = x * f,  f = exp(log_scale) / rms(x - bias)
    d/dx    = grad * f + c,  c = (sum_E grad * x) * f * (bias - x) / |x - bias|^2
    d/dbias = -(sum over rows of c),  d/dlog_scale = sum over rows of (sum_E grad * x) * f

Axes: E channels; a row is one frame of one sequence. A program takes tiles of whole rows:

          E ->
    row   [ . . . . ]   all channels, in registers,
     |    [ . . . . ]   of BLOCK_R rows; program p takes every P-th tile

For sums over rows, each program writes the sum of its own rows, a part; see `sums_of_parts`.
torch's kernels take longer, and need copies if x and the output differ in dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import kernel
from pruned_rnnt.model.kernels.rows import load_channels, own_tile, row_tiles, rows_of_turn

# Elements of a tile of layer normalisation, and of BiasNorm.
_LAYER_TILE, _BIAS_TILE = 2048, 4096


class RowStatistics(NamedTuple):
    """Mean and 1 / deviation of each row of x, float32."""

    mean: Tensor
    inverse_deviation: Tensor


@kernel("rows")
def _layer_norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    mean_ptr,
    inverse_deviation_ptr,
    rows,
    E,
    epsilon,
    HAS_SILU: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    row, channel, inside = own_tile(rows, E, BLOCK_R, BLOCK_E)
    place = row[:, None] * E + channel[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=1) / E
    centred = tl.where(inside, x - mean[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, axis=1) / E + epsilon)
    z = centred * inverse[:, None]
    out = z * load_channels(weight_ptr, channel, E) + load_channels(bias_ptr, channel, E)
    if HAS_SILU:
        out *= tl.sigmoid(out)
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(inverse_deviation_ptr + row, inverse, mask=row < rows)


@kernel("rows", "turns")
def _layer_norm_backward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    inverse_deviation_ptr,
    grad_ptr,
    grad_x_ptr,
    of_weight_ptr,
    of_bias_ptr,
    rows,
    turns,
    E,
    HAS_SILU: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    channel = tl.arange(0, BLOCK_E)
    weight = load_channels(weight_ptr, channel, E)
    if HAS_SILU:
        bias = load_channels(bias_ptr, channel, E)
    # Tiles, because a sum over the rows in each turn would wait for all warps.
    of_weight = tl.zeros((BLOCK_R, BLOCK_E), dtype=tl.float32)
    of_bias = tl.zeros((BLOCK_R, BLOCK_E), dtype=tl.float32)
    for turn in range(turns):
        row, inside = rows_of_turn(turn, rows, channel, E, BLOCK_R)
        place = row[:, None] * E + channel[None, :]
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        inverse = tl.load(inverse_deviation_ptr + row, mask=row < rows, other=0.0)
        z = tl.where(inside, (x - mean[:, None]) * inverse[:, None], 0.0)
        if HAS_SILU:
            y = z * weight + bias
            gate = tl.sigmoid(y)
            grad *= gate * (1.0 + y * (1.0 - gate))
        h = grad * weight
        mean_h = tl.sum(h, axis=1) / E
        mean_hz = tl.sum(h * z, axis=1) / E
        grad_x = inverse[:, None] * (h - mean_h[:, None] - z * mean_hz[:, None])
        tl.store(grad_x_ptr + place, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
        of_weight += grad * z
        of_bias += grad
    part = tl.program_id(0) * E + channel
    tl.store(of_weight_ptr + part, tl.sum(of_weight, axis=0), mask=channel < E)
    tl.store(of_bias_ptr + part, tl.sum(of_bias, axis=0), mask=channel < E)


def layer_norm(
    x: Tensor,
    weight_E: Tensor,
    bias_E: Tensor,
    *,
    epsilon: float,
    silu: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, RowStatistics]:
    """Layer normalisation of x (..., E), contiguous, in `dtype`; `silu`: with SiLU after it."""
    width = x.size(-1)
    rows = x.numel() // width
    output = torch.empty_like(x, dtype=dtype)
    statistics = RowStatistics(*(x.new_empty((rows,), dtype=torch.float32) for _ in range(2)))
    tiles = row_tiles(rows, width, _LAYER_TILE)
    _layer_norm_kernel(
        (tiles.number,),
        x,
        weight_E,
        bias_E,
        output,
        *statistics,
        rows,
        width,
        epsilon,
        silu,
        tiles.rows,
        tiles.channels,
    )
    return output, statistics


def layer_norm_backward(
    x: Tensor,
    weight_E: Tensor,
    bias_E: Tensor,
    statistics: RowStatistics,
    grad: Tensor,
    *,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x and, as parts (P, E) in float32, of weight and bias.

    Args:
        x, weight_E, bias_E, silu: of `layer_norm`, which returned `statistics`.
        grad: (..., E), contiguous.
    """
    width = x.size(-1)
    rows = x.numel() // width
    grad_x = torch.empty_like(x)
    tiles = row_tiles(rows, width, _LAYER_TILE)
    of_weight = x.new_empty((tiles.parts, width), dtype=torch.float32)
    of_bias = torch.empty_like(of_weight)
    _layer_norm_backward_kernel(
        (tiles.parts,),
        x,
        weight_E,
        bias_E,
        *statistics,
        grad,
        grad_x,
        of_weight,
        of_bias,
        rows,
        tiles.turns,
        width,
        silu,
        tiles.rows,
        tiles.channels,
    )
    return grad_x, of_weight, of_bias


@kernel("rows")
def _bias_norm_kernel(
    x_ptr,
    bias_ptr,
    log_scale_ptr,
    out_ptr,
    factor_ptr,
    rows,
    E,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    row, channel, inside = own_tile(rows, E, BLOCK_R, BLOCK_E)
    place = row[:, None] * E + channel[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, x - load_channels(bias_ptr, channel, E), 0.0)
    mean_square = tl.sum(centred * centred, axis=1) / E
    factor = tl.exp(tl.load(log_scale_ptr).to(tl.float32)) / tl.sqrt(mean_square)
    tl.store(factor_ptr + row, factor, mask=row < rows)
    out = x * factor[:, None]
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=inside)


@kernel("rows", "turns")
def _bias_norm_backward_kernel(
    x_ptr,
    bias_ptr,
    log_scale_ptr,
    factor_ptr,
    grad_ptr,
    grad_x_ptr,
    of_bias_ptr,
    of_scale_ptr,
    rows,
    turns,
    E,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    channel = tl.arange(0, BLOCK_E)
    bias = load_channels(bias_ptr, channel, E)
    scale = tl.exp(tl.load(log_scale_ptr).to(tl.float32))
    of_bias = tl.zeros((BLOCK_E,), dtype=tl.float32)
    of_scale = tl.zeros((BLOCK_R,), dtype=tl.float32)
    for turn in range(turns):
        row, inside = rows_of_turn(turn, rows, channel, E, BLOCK_R)
        place = row[:, None] * E + channel[None, :]
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(factor_ptr + row, mask=row < rows, other=1.0)
        product = tl.sum(grad * x, axis=1) * factor
        # |x - bias|^2 = E * (scale / f)^2.
        share = product * factor * factor / (E * scale * scale)
        through_size = tl.where(inside, (bias - x) * share[:, None], 0.0)
        grad_x = grad * factor[:, None] + through_size
        tl.store(grad_x_ptr + place, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
        of_bias -= tl.sum(through_size, axis=0)
        of_scale += product
    tl.store(of_bias_ptr + tl.program_id(0) * E + channel, of_bias, mask=channel < E)
    tl.store(of_scale_ptr + tl.program_id(0), tl.sum(of_scale, axis=0))


def bias_norm(x: Tensor, bias_E: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
    """x / rms(x - bias) * exp(log_scale) in the dtype of x, and the factor of each row, float32."""
    width = x.size(-1)
    rows = x.numel() // width
    out = torch.empty_like(x)
    factor = x.new_empty((rows,), dtype=torch.float32)
    tiles = row_tiles(rows, width, _BIAS_TILE)
    _bias_norm_kernel(
        (tiles.number,),
        x,
        bias_E,
        log_scale,
        out,
        factor,
        rows,
        width,
        tiles.rows,
        tiles.channels,
    )
    return out, factor


def bias_norm_backward(
    x: Tensor, bias_E: Tensor, log_scale: Tensor, factor: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x and, as parts (P, E) and (P, 1) in float32, of bias and log_scale."""
    width = x.size(-1)
    rows = x.numel() // width
    grad_x = torch.empty_like(x)
    tiles = row_tiles(rows, width, _BIAS_TILE // 2)
    of_bias = x.new_empty((tiles.parts, width), dtype=torch.float32)
    of_scale = x.new_empty((tiles.parts,), dtype=torch.float32)
    _bias_norm_backward_kernel(
        (tiles.parts,),
        x,
        bias_E,
        log_scale,
        factor,
        grad,
        grad_x,
        of_bias,
        of_scale,
        rows,
        tiles.turns,
        width,
        tiles.rows,
        tiles.channels,
    )
    return grad_x, of_bias, of_scale.view(-1, 1)
