"""Convolutions of maps by 3 x 3 weights: of the features, one map, and the gradients of weights.

    out[n, t, f, c]       = bias[c] + sum_ij weight[i, j, c] * x[n, t S + i, f S' + j - P]
    of_weight[i, j, c]    = sum_ntf grad[n, t, f, c] * x[n, t S + i, f S' + j - P]
    of_weight[o, i, j, c] = sum_ntf grad[n, t, f, o] * x[n, t S + i, f S' + j, c]   of several maps

zero beyond the F bins of x. There is no padding in time.

Axes: N sequences, T and T' frames of x and of the output, F and F' bins, C channels (of x, if it
has several maps), O output channels of such an x, S and S' strides, P padding; positions, or rows,
are N * T' * F'.

Of one map, a program takes a tile of positions with their channels, and reads nine values of x for
each position; for the weights' gradient, it takes one i and a part of the positions:

    x row t S + i    | . [j = 0 1 2] . . . |        out    [ c = 0 1 ... C - 1 ]   of a position

Of several maps, a program takes one i, a part of the rows, and a block of the O x C weights, and
adds three products of matrices, one for each j:

    grad (BLOCK_R, BLOCK_O) transposed   times   x (BLOCK_R, BLOCK_C) of the windows' j-th column

cuDNN's kernels for one input channel take longer than the rest of the embedding, and its weight
gradient for several takes several times as long; a single product of all windows needs a copy of x
for each of the nine weights. Sums over parts have a fixed order, so results are reproducible.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import divide_up, kernel, power_of_two
from pruned_rnnt.model.kernels.rows import sums_of_parts

# Of one map: elements of a tile, and programs that share the positions in the sums over them.
_TILE, _FIRST_PROGRAMS = 2048, 1584
# Of several maps: rows of a tile, and programs.
_ROWS, _PROGRAMS = 64, 396
# Most output and input channels of a block: three sums of this size fit into registers.
_MOST_OUTPUTS, _MOST_CHANNELS = 128, 32
# A product of matrices needs 16 rows and columns.
_LEAST = 16


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
def _first_kernel(
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
def _first_weight_kernel(
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
    _first_kernel(
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
    parts = min(tiles, _FIRST_PROGRAMS // 3)
    of_weight = grad_NTFC.new_empty((parts, 9 * channels), dtype=torch.float32)
    _first_weight_kernel(
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


@triton.jit
def _column(x_ptr, first, inside, channel, j, C):
    """Column j of the windows whose first column starts at `first`: (BLOCK_R, BLOCK_C)."""
    place = first[:, None] + (channel + j * C)[None, :]
    return tl.load(x_ptr + place, mask=inside[:, None] & (channel < C)[None, :], other=0.0)


@kernel("rows", "out_frames", "out_bins", "frames", "bins", "turns")
def _window_weight_kernel(
    x_ptr,
    grad_ptr,
    of_weight_ptr,
    rows,
    out_frames,
    out_bins,
    frames,
    bins,
    turns,
    OUT: tl.constexpr,
    C: tl.constexpr,
    FRAME_STRIDE: tl.constexpr,
    BIN_STRIDE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i = tl.program_id(0)
    blocks: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    output = tl.program_id(2) // blocks * BLOCK_O + tl.arange(0, BLOCK_O)
    channel = tl.program_id(2) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    total_0 = tl.zeros((BLOCK_O, BLOCK_C), dtype=tl.float32)
    total_1 = tl.zeros((BLOCK_O, BLOCK_C), dtype=tl.float32)
    total_2 = tl.zeros((BLOCK_O, BLOCK_C), dtype=tl.float32)
    for turn in range(turns):
        tile = turn * tl.num_programs(1) + tl.program_id(1)
        row = tile.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
        inside = row < rows
        frame = row // out_bins
        sequence = frame // out_frames
        source = sequence * frames + (frame - sequence * out_frames) * FRAME_STRIDE + i
        first = (source * bins + (row - frame * out_bins) * BIN_STRIDE) * C
        grad = tl.load(
            grad_ptr + row[:, None] * OUT + output[None, :],
            mask=inside[:, None] & (output < OUT)[None, :],
            other=0.0,
        )
        grad = tl.trans(grad)
        x = _column(x_ptr, first, inside, channel, 0, C)
        total_0 = tl.dot(grad, x, total_0, input_precision=PRECISION)
        x = _column(x_ptr, first, inside, channel, 1, C)
        total_1 = tl.dot(grad, x, total_1, input_precision=PRECISION)
        x = _column(x_ptr, first, inside, channel, 2, C)
        total_2 = tl.dot(grad, x, total_2, input_precision=PRECISION)
    out = of_weight_ptr + tl.program_id(1) * OUT * 9 * C
    out += (output * 9 * C)[:, None] + (i * 3 * C + channel)[None, :]
    inside = (output < OUT)[:, None] & (channel < C)[None, :]
    tl.store(out, total_0, mask=inside)
    tl.store(out + C, total_1, mask=inside)
    tl.store(out + 2 * C, total_2, mask=inside)


def window_weight_gradient(x_NTFC: Tensor, grad_NTFO: Tensor, stride: tuple[int, int]) -> Tensor:
    """(O, 3, 3, C) in the dtype of x, for a convolution without padding.

    Args:
        x_NTFC, grad_NTFO: contiguous, of one dtype.
        stride: in frames and in bins.
    """
    batch, frames, bins, channels = x_NTFC.shape
    _, out_frames, out_bins, outputs = grad_NTFO.shape
    rows = batch * out_frames * out_bins
    block_o = max(min(power_of_two(outputs), _MOST_OUTPUTS), _LEAST)
    block_c = max(min(power_of_two(channels), _MOST_CHANNELS), _LEAST)
    blocks = divide_up(outputs, block_o) * divide_up(channels, block_c)
    tiles = divide_up(rows, _ROWS)
    parts = min(tiles, max(_PROGRAMS // (3 * blocks), 1))
    of_weight = x_NTFC.new_empty((parts, outputs * 9 * channels), dtype=torch.float32)
    _window_weight_kernel(
        (3, parts, blocks),
        x_NTFC,
        grad_NTFO,
        of_weight,
        rows,
        out_frames,
        out_bins,
        frames,
        bins,
        divide_up(tiles, parts),
        outputs,
        channels,
        *stride,
        _ROWS,
        block_o,
        block_c,
        "tf32x3" if x_NTFC.dtype == torch.float32 else "ieee",
        num_warps=8,
    )
    return sums_of_parts(of_weight, x_NTFC.dtype).view(outputs, 3, 3, channels)
