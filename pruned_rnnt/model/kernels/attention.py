"""Parts of attention besides its matrix products, each in one pass over memory.

    heads      rows (N, T, H * K)   | h0 h1 h2 | h0 h1 h2 | ...          one frame after another
               to and from the matrices of each head
               heads (N, H, T, P)   | h0 h0 ...| h1 h1 ...| h2 h2 ...    one head after another
    squash     out = value * tanh(squashed), or 0 if the device switches it off
    product    out = x * factor
    uniform    out[n, t, s] = weights[n, t, s], or 1 / (number of frames with a weight) for these
                              frames if the device has chosen uniform weights

Axes: N sequences, H heads, T frames, S frames attended to, K channels of a head, P these and zeros
up to a multiple of 8, C channels. One program takes

    heads     [ . . . . ]           the H * P channels of each of BLOCK_R rows (frames)
    squash    [ . . . . ]           the C channels of each of BLOCK_R rows
    product   [ . . . . ]           the same
    uniform   [ . . . . . . . . ]   the S columns of one row t

Batches of matrix products need the matrices of each head; torch copies to them several times as
slowly, and once for each product. In half precision, rows of other lengths take slow products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import column_block, kernel
from pruned_rnnt.model.kernels.rows import as_rows, own_tile, row_tiles

_HEADS_TILE, _TILE = 1024, 2048
# Rows of products in half precision have multiples of it.
_ALIGNED = 8


@kernel("rows", "frames")
def _heads_kernel(
    rows_ptr,
    heads_ptr,
    rows,
    frames,
    row_stride,
    channels,
    K,
    P,
    TO_HEADS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row, channel, inside = own_tile(rows, channels, BLOCK_R, BLOCK_C)
    sequence = row // frames
    # Row h * T of the matrices of a sequence is the first one of head h.
    first = sequence * (channels // P) * frames + row - sequence * frames
    head = channel // P
    of_head = channel - head * P
    in_rows = rows_ptr + row[:, None] * row_stride + (head * K + of_head)[None, :]
    in_heads = heads_ptr + (first[:, None] + head[None, :] * frames) * P + of_head[None, :]
    has_value = inside & (of_head < K)[None, :]
    if TO_HEADS:
        tl.store(in_heads, tl.load(in_rows, mask=has_value, other=0.0), mask=inside)
    else:
        tl.store(in_rows, tl.load(in_heads, mask=has_value, other=0.0), mask=has_value)


def to_heads(x_NTC: Tensor, heads: int) -> Tensor:
    """(N, T, H * K) -> (N, H, T, P), contiguous; the rows of x have one stride."""
    batch, frames, channels = x_NTC.shape
    width = channels // heads
    out = x_NTC.new_empty((batch, heads, frames, -(-width // _ALIGNED) * _ALIGNED))
    rows = as_rows(x_NTC)
    _launch_heads(rows.tensor, out, rows.stride, width, to_heads=True)
    return out


def from_heads(x_NHTP: Tensor, width: int) -> Tensor:
    """The first K = `width` channels of heads (N, H, T, P), contiguous -> (N, T, H * K)."""
    batch, heads, frames, _ = x_NHTP.shape
    out = x_NHTP.new_empty((batch, frames, heads * width))
    _launch_heads(out, x_NHTP, out.size(-1), width, to_heads=False)
    return out


def _launch_heads(
    x_NTC: Tensor, x_NHTP: Tensor, row_stride: int, width: int, *, to_heads: bool
) -> None:
    batch, heads, frames, padded = x_NHTP.shape
    rows, channels = batch * frames, heads * padded
    tiles = row_tiles(rows, channels, _HEADS_TILE)
    _heads_kernel(
        (tiles.number,),
        x_NTC,
        x_NHTP,
        rows,
        frames,
        row_stride,
        channels,
        width,
        padded,
        to_heads,
        tiles.rows,
        tiles.channels,
    )


@triton.jit
def _tanh(x):
    # exp(-2 |x|) cannot overflow.
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    # Near zero 1 - small cancels; five terms of the series have a relative error below 1e-8.
    square = x * x
    series = 62.0 / 2835.0
    series = series * square - 17.0 / 315.0
    series = series * square + 2.0 / 15.0
    series = series * square - 1.0 / 3.0
    series = x + x * (series * square)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0.0, -size, size))


@kernel("rows")
def _squash_kernel(
    value_ptr,
    squashed_ptr,
    off_ptr,
    out_ptr,
    rows,
    value_stride,
    squashed_stride,
    C,
    HAS_SWITCH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    channel = tl.arange(0, BLOCK_C)[None, :]
    inside = (row < rows)[:, None] & (channel < C)
    value = tl.load(value_ptr + row[:, None] * value_stride + channel, mask=inside, other=0.0)
    squashed = tl.load(
        squashed_ptr + row[:, None] * squashed_stride + channel, mask=inside, other=0.0
    )
    out = value.to(tl.float32) * _tanh(squashed.to(tl.float32))
    if HAS_SWITCH:
        out = tl.where(tl.load(off_ptr) > 0.0, 0.0, out)
    tl.store(out_ptr + row[:, None] * C + channel, out.to(out_ptr.dtype.element_ty), mask=inside)


@kernel("rows")
def _squash_backward_kernel(
    value_ptr,
    squashed_ptr,
    grad_ptr,
    of_value_ptr,
    of_squashed_ptr,
    rows,
    value_stride,
    squashed_stride,
    C,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    channel = tl.arange(0, BLOCK_C)[None, :]
    inside = (row < rows)[:, None] & (channel < C)
    value = tl.load(value_ptr + row[:, None] * value_stride + channel, mask=inside, other=0.0)
    squashed = tl.load(
        squashed_ptr + row[:, None] * squashed_stride + channel, mask=inside, other=0.0
    )
    place = row[:, None] * C + channel
    grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
    factor = _tanh(squashed.to(tl.float32))
    of_squashed = grad * value.to(tl.float32) * (1.0 - factor * factor)
    tl.store(of_value_ptr + place, (grad * factor).to(of_value_ptr.dtype.element_ty), mask=inside)
    tl.store(of_squashed_ptr + place, of_squashed.to(of_squashed_ptr.dtype.element_ty), mask=inside)


@kernel("rows")
def _product_kernel(
    x_ptr,
    factor_ptr,
    grad_ptr,
    out_ptr,
    of_factor_ptr,
    rows,
    factor_stride,
    C,
    HAS_GRAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """x * factor; or, if HAS_GRAD, its gradients: of x in `out`, and of the factor."""
    row, channel, inside = own_tile(rows, C, BLOCK_R, BLOCK_C)
    place = row[:, None] * C + channel[None, :]
    factor_place = factor_ptr + row[:, None] * factor_stride + channel[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(factor_place, mask=inside, other=0.0).to(tl.float32)
    if HAS_GRAD:
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(of_factor_ptr + place, (grad * x).to(of_factor_ptr.dtype.element_ty), mask=inside)
        x = grad
    tl.store(out_ptr + place, (x * factor).to(out_ptr.dtype.element_ty), mask=inside)


@kernel("frames")
def _uniform_kernel(
    weights_ptr,
    chosen_ptr,
    out_ptr,
    frames,
    seen,
    sequence_stride,
    frame_stride,
    BLOCK_S: tl.constexpr,
):
    frame = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK_S)
    inside = column < seen
    place = weights_ptr + sequence * sequence_stride + frame * frame_stride + column
    weight = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if tl.load(chosen_ptr) > 0.0:
        attended = tl.where(weight > 0.0, 1.0, 0.0)
        weight = attended / tl.sum(attended, axis=0)
    out = out_ptr + (sequence * frames + frame) * seen + column
    tl.store(out, weight.to(out_ptr.dtype.element_ty), mask=inside)


def squash(value: Tensor, squashed: Tensor, off: Tensor | None = None) -> Tensor:
    """value * tanh(squashed), (..., C), contiguous; zeros if `off`, (1,) float32, is 1."""
    of_value, of_squashed = as_rows(value), as_rows(squashed)
    out = value.new_empty(value.shape)
    width = value.size(-1)
    tiles = row_tiles(of_value.number, width, _TILE)
    _squash_kernel(
        (tiles.number,),
        of_value.tensor,
        of_squashed.tensor,
        off,
        out,
        of_value.number,
        of_value.stride,
        of_squashed.stride,
        width,
        off is not None,
        tiles.rows,
        tiles.channels,
    )
    return out


def squash_backward(value: Tensor, squashed: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of both arguments of `squash`; `grad` is contiguous."""
    of_value, of_squashed = as_rows(value), as_rows(squashed)
    grad_value, grad_squashed = torch.empty_like(grad), torch.empty_like(grad)
    width = value.size(-1)
    tiles = row_tiles(of_value.number, width, _TILE)
    _squash_backward_kernel(
        (tiles.number,),
        of_value.tensor,
        of_squashed.tensor,
        grad,
        grad_value,
        grad_squashed,
        of_value.number,
        of_value.stride,
        of_squashed.stride,
        width,
        tiles.rows,
        tiles.channels,
    )
    return grad_value, grad_squashed


def product(x: Tensor, factor: Tensor) -> Tensor:
    """x * factor, (..., C); x is contiguous, the rows of the factor have one stride."""
    out = torch.empty_like(x)
    _launch_product(x, factor, None, out, None)
    return out


def product_backward(x: Tensor, factor: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of both arguments of `product`; `grad` is contiguous."""
    of_x, of_factor = torch.empty_like(x), torch.empty_like(x)
    _launch_product(x, factor, grad, of_x, of_factor)
    return of_x, of_factor


def _launch_product(
    x: Tensor, factor: Tensor, grad: Tensor | None, out: Tensor, of_factor: Tensor | None
) -> None:
    rows, width = as_rows(factor), x.size(-1)
    tiles = row_tiles(rows.number, width, _TILE)
    _product_kernel(
        (tiles.number,),
        x,
        rows.tensor,
        grad,
        out,
        of_factor,
        rows.number,
        rows.stride,
        width,
        grad is not None,
        tiles.rows,
        tiles.channels,
    )


def uniform_if(weights_NTS: Tensor, chosen: Tensor) -> Tensor:
    """The weights, or uniform ones if `chosen`, (1,) float32 on the device, is 1; contiguous.

    Args:
        weights_NTS: at least 0; contiguous along S.
    """
    batch, frames, seen = weights_NTS.shape
    out = weights_NTS.new_empty(weights_NTS.shape)
    block_s = column_block(seen)
    _uniform_kernel(
        (frames, batch),
        weights_NTS,
        chosen,
        out,
        frames,
        seen,
        weights_NTS.stride(0),
        weights_NTS.stride(1),
        block_s,
        num_warps=max(min(block_s // 256, 8), 1),
    )
    return out
