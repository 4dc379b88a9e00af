"""Convolution of one map, the features, by 3 x 3 weights for several channels.

    out[n, t, f, c] = bias[c] + sum_ij weight[i, j, c] * x[n, t S + i, f S' + j - P]

zero beyond the F bins of x. There is no padding in time.

Axes: N sequences, T and T' frames of x and of the output, F and F' bins, C channels, S and S'
strides, P padding; positions are N * T' * F'. A program takes a tile of positions with their
channels, and reads nine values of x for each position:

    x row t S + i    | . [j = 0 1 2] . . . |        out    [ c = 0 1 ... C - 1 ]   of a position

For the weights' gradient, a program takes one i and a part of the positions. cuDNN's kernels for
one input channel take longer than the rest of the embedding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import divide_up, kernel, power_of_two
from pruned_rnnt.model.kernels.sums import sums_of_parts

_TILE = 2048
# Programs that share the positions in the sums over them.
_PROGRAMS = 1584


@triton.jit
def _values(
    x_ptr, position, positions, i, j, frames, bins, out_frames, out_bins,
    TIME_STRIDE: tl.constexpr, BIN_STRIDE: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """x at place (i, j) of the windows of positions, in its own dtype; zero beyond the bins."""
    frame = position // out_bins
    sequence = frame // out_frames
    source = sequence * frames + (frame - sequence * out_frames) * TIME_STRIDE + i
    bin = (position - frame * out_bins) * BIN_STRIDE + j - PADDING
    inside = (position < positions) & (bin >= 0) & (bin < bins)
    return tl.load(x_ptr + source * bins + bin, mask=inside, other=0.0)


@kernel("positions", "frames", "bins", "out_frames", "out_bins")
def _forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    positions,
    frames,
    bins,
    out_frames,
    out_bins,
    C: tl.constexpr,
    TIME_STRIDE: tl.constexpr,
    BIN_STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    channel = tl.arange(0, BLOCK_C)
    has_channel = channel < C
    total = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    total += tl.load(bias_ptr + channel, mask=has_channel, other=0.0).to(tl.float32)[None, :]
    for place in tl.static_range(9):
        x = _values(
            x_ptr, position, positions, place // 3, place % 3, frames, bins, out_frames, out_bins,
            TIME_STRIDE, BIN_STRIDE, PADDING,
        )  # fmt: skip
        x = x.to(out_ptr.dtype.element_ty).to(tl.float32)
        weight = tl.load(weight_ptr + place * C + channel, mask=has_channel, other=0.0)
        total += x[:, None] * weight.to(tl.float32)[None, :]
    inside = (position < positions)[:, None] & has_channel[None, :]
    out = out_ptr + position[:, None] * C + channel[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)


@kernel("positions", "frames", "bins", "out_frames", "out_bins", "turns")
def _weight_kernel(
    x_ptr,
    grad_ptr,
    of_weight_ptr,
    positions,
    frames,
    bins,
    out_frames,
    out_bins,
    turns,
    C: tl.constexpr,
    TIME_STRIDE: tl.constexpr,
    BIN_STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """of_weight (P, 3, 3, C) over the positions of each part; program (i, part)."""
    i = tl.program_id(0)
    channel = tl.arange(0, BLOCK_C)
    has_channel = channel < C
    total_0 = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    total_1 = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    total_2 = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    for turn in range(turns):
        tile = turn * tl.num_programs(1) + tl.program_id(1)
        position = tile.to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
        grad = tl.load(
            grad_ptr + position[:, None] * C + channel[None, :],
            mask=(position < positions)[:, None] & has_channel[None, :],
            other=0.0,
        )
        dtype: tl.constexpr = grad_ptr.dtype.element_ty
        grad = grad.to(tl.float32)
        x = _values(
            x_ptr, position, positions, i, 0, frames, bins, out_frames, out_bins,
            TIME_STRIDE, BIN_STRIDE, PADDING,
        )  # fmt: skip
        total_0 += x.to(dtype).to(tl.float32)[:, None] * grad
        x = _values(
            x_ptr, position, positions, i, 1, frames, bins, out_frames, out_bins,
            TIME_STRIDE, BIN_STRIDE, PADDING,
        )  # fmt: skip
        total_1 += x.to(dtype).to(tl.float32)[:, None] * grad
        x = _values(
            x_ptr, position, positions, i, 2, frames, bins, out_frames, out_bins,
            TIME_STRIDE, BIN_STRIDE, PADDING,
        )  # fmt: skip
        total_2 += x.to(dtype).to(tl.float32)[:, None] * grad
    out = of_weight_ptr + (tl.program_id(1) * 3 + i) * 3 * C + channel
    tl.store(out, tl.sum(total_0, axis=0), mask=has_channel)
    tl.store(out + C, tl.sum(total_1, axis=0), mask=has_channel)
    tl.store(out + 2 * C, tl.sum(total_2, axis=0), mask=has_channel)


def convolve_first(
    x_NTF: Tensor, weight_9C: Tensor, bias_C: Tensor, window: tuple[int, int, int]
) -> Tensor:
    """(N, T', F', C) in the dtype of the weights, to which x is rounded; all are contiguous.

    Args:
        window: strides in time and frequency, and padding in frequency.
    """
    batch, frames, bins = x_NTF.shape
    channels = bias_C.size(0)
    time_stride, bin_stride, padding = window
    out_frames = (frames - 3) // time_stride + 1
    out_bins = (bins + 2 * padding - 3) // bin_stride + 1
    out = weight_9C.new_empty((batch, out_frames, out_bins, channels))
    positions = batch * out_frames * out_bins
    block_c = power_of_two(channels)
    block_p = max(_TILE // block_c, 1)
    _forward_kernel(
        (divide_up(positions, block_p),),
        x_NTF,
        weight_9C,
        bias_C,
        out,
        positions,
        frames,
        bins,
        out_frames,
        out_bins,
        channels,
        *window,
        block_p,
        block_c,
    )
    return out


def first_weight_gradient(x_NTF: Tensor, grad_NTFC: Tensor, window: tuple[int, int, int]) -> Tensor:
    """The gradient of the weights, (9, C) in the dtype of `grad_NTFC`; both are contiguous."""
    batch, frames, bins = x_NTF.shape
    _, out_frames, out_bins, channels = grad_NTFC.shape
    positions = batch * out_frames * out_bins
    block_c = power_of_two(channels)
    block_p = max(_TILE // block_c, 1)
    tiles = divide_up(positions, block_p)
    parts = min(tiles, _PROGRAMS // 3)
    of_weight = grad_NTFC.new_empty((parts, 9 * channels), dtype=torch.float32)
    _weight_kernel(
        (3, parts),
        x_NTF,
        grad_NTFC,
        of_weight,
        positions,
        frames,
        bins,
        out_frames,
        out_bins,
        divide_up(tiles, parts),
        channels,
        *window,
        block_p,
        block_c,
    )
    return sums_of_parts(of_weight, grad_NTFC.dtype).view(9, channels)
