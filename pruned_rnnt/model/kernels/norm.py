"""BiasNorm in one pass over memory, forward and backward.

    out = x * f,  f = exp(log_scale) / rms(x - bias)
    d/dx    = grad * f + c,  c = (sum_E grad * x) * f * (bias - x) / |x - bias|^2
    d/dbias = -(sum over rows of c),  d/dlog_scale = sum over rows of (sum_E grad * x) * f

Axes: E channels; a row is one frame of one sequence. A program takes a tile of whole rows:

          E ->
    row   [ . . . . ]   all channels, in registers,
     |    [ . . . . ]   of BLOCK_R rows

For sums over rows, each program writes the sum of its own rows, a part; see `sums_of_parts`.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import kernel
from pruned_rnnt.model.kernels.rows import load_channels, own_tile, row_tiles, rows_of_turn

_TILE = 4096


@kernel("rows")
def _norm_kernel(
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
def _norm_backward_kernel(
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
    tiles = row_tiles(rows, width, _TILE)
    _norm_kernel(
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
    tiles = row_tiles(rows, width, _TILE // 2)
    of_bias = x.new_empty((tiles.parts, width), dtype=torch.float32)
    of_scale = x.new_empty((tiles.parts,), dtype=torch.float32)
    _norm_backward_kernel(
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
