"""Weighted means of groups of D frames, of a real utterance's frames alone.

    out[n, t] = sum_d weight[d] * x[n, t D + min(d, last)],  last = lengths[n] - t D - 1

`last` is the last real frame within a group; where it is negative, the group has none, and the
result is zero.

    x     | 0 1 | 2 3 | 4 . | . . |    T frames, 5 of them real, D = 2
    out   |  0  |  1  |  2  |  0  |    T / D frames

Axes: N sequences, T frames, E channels. A program takes tiles of BLOCK_R rows (one frame of the
result each) with all channels. The gradient of the weights is a sum over rows in two steps; see
`sums_of_parts`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import kernel, power_of_two
from pruned_rnnt.model.kernels.rows import own_tile, row_tiles, rows_of_turn

_TILE = 2048


@triton.jit
def _last_real(lengths_ptr, row, rows, slow_frames, RATE: tl.constexpr):
    """The last real frame within the group of each row."""
    sequence = row // slow_frames
    length = tl.load(lengths_ptr + sequence, mask=row < rows, other=0)
    return (length - (row - sequence * slow_frames) * RATE - 1).to(tl.int32)


@triton.jit
def _weight_of(weights_ptr, frame, last, RATE: tl.constexpr, BLOCK_D: tl.constexpr):
    """The weight of a frame of each group: with those of the missing frames if it is the last."""
    index = tl.arange(0, BLOCK_D)
    weights = tl.load(weights_ptr + index, mask=index < RATE, other=0.0).to(tl.float32)
    own = tl.sum(tl.where(index == frame, weights, 0.0), axis=0)
    with_missing = tl.sum(tl.where(index >= frame, weights, 0.0), axis=0)
    return tl.where(frame < last, own, tl.where(frame == last, with_missing, 0.0))


@kernel("rows", "slow_frames")
def _downsample_kernel(
    x_ptr,
    weights_ptr,
    lengths_ptr,
    out_ptr,
    rows,
    slow_frames,
    RATE: tl.constexpr,
    E,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row, channel, inside = own_tile(rows, E, BLOCK_R, BLOCK_E)
    last = _last_real(lengths_ptr, row, rows, slow_frames, RATE)
    total = tl.zeros((BLOCK_R, BLOCK_E), dtype=tl.float32)
    for frame in range(RATE):
        place = (row * RATE + frame)[:, None] * E + channel[None, :]
        real = inside & (frame <= last)[:, None]
        x = tl.load(x_ptr + place, mask=real, other=0.0).to(tl.float32)
        total += x * _weight_of(weights_ptr, frame, last, RATE, BLOCK_D)[:, None]
    place = row[:, None] * E + channel[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)


@kernel("rows", "slow_frames", "turns")
def _downsample_backward_kernel(
    x_ptr,
    weights_ptr,
    lengths_ptr,
    grad_ptr,
    grad_x_ptr,
    parts_ptr,
    rows,
    slow_frames,
    turns,
    RATE: tl.constexpr,
    E,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    channel = tl.arange(0, BLOCK_E)
    index = tl.arange(0, BLOCK_D)
    of_weights = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for turn in range(turns):
        row, inside = rows_of_turn(turn, rows, channel, E, BLOCK_R)
        last = _last_real(lengths_ptr, row, rows, slow_frames, RATE)
        place = row[:, None] * E + channel[None, :]
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        for frame in range(RATE):
            place = (row * RATE + frame)[:, None] * E + channel[None, :]
            real = inside & (frame <= last)[:, None]
            x = tl.load(x_ptr + place, mask=real, other=0.0).to(tl.float32)
            grad_x = grad * _weight_of(weights_ptr, frame, last, RATE, BLOCK_D)[:, None]
            tl.store(grad_x_ptr + place, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
            product = tl.sum(grad * x, axis=1)
            own = (index[None, :] == frame) & (frame < last)[:, None]
            missing = (index[None, :] >= frame) & (frame == last)[:, None]
            of_weights += tl.sum(tl.where(own | missing, product[:, None], 0.0), axis=0)
    place = parts_ptr + tl.program_id(0) * RATE + index
    tl.store(place, of_weights, mask=index < RATE)


def downsample(x_NTE: Tensor, weights_D: Tensor, lengths_N: Tensor, dtype: torch.dtype) -> Tensor:
    """(N, T / D, E) in `dtype`, from x, which is contiguous; T is a multiple of D."""
    (batch, frames, width), rate = x_NTE.shape, weights_D.size(0)
    out = x_NTE.new_empty((batch, frames // rate, width), dtype=dtype)
    rows = batch * out.size(1)
    tiles = row_tiles(rows, width, _TILE)
    _downsample_kernel(
        (tiles.number,),
        x_NTE,
        weights_D,
        lengths_N,
        out,
        rows,
        out.size(1),
        rate,
        width,
        tiles.rows,
        tiles.channels,
        power_of_two(rate),
    )
    return out


def downsample_backward(
    x_NTE: Tensor, weights_D: Tensor, lengths_N: Tensor, grad_NSE: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x and, as parts (P, D) in float32, of the weights; all contiguous."""
    (batch, slow_frames, width), rate = grad_NSE.shape, weights_D.size(0)
    grad_x = torch.empty_like(x_NTE)
    rows = batch * slow_frames
    tiles = row_tiles(rows, width, _TILE)
    parts = x_NTE.new_empty((tiles.parts, rate), dtype=torch.float32)
    _downsample_backward_kernel(
        (tiles.parts,),
        x_NTE,
        weights_D,
        lengths_N,
        grad_NSE,
        grad_x,
        parts,
        rows,
        slow_frames,
        tiles.turns,
        rate,
        width,
        tiles.rows,
        tiles.channels,
        power_of_two(rate),
    )
    return grad_x, parts
