"""The weight gradient of a convolution of maps (N, T, F, C) by 3 x 3 weights.

    of_weight[o, i, j, c] = sum_ntf grad[n, t, f, o] * x[n, t S + i, f S' + j, c]

Axes: N sequences, T frames, F bins, C input channels, O output channels, S and S' strides; T' and
F' are frames and bins of the output; rows are its N T' F' positions. A program takes one i, a part
of the rows, and a block of the O x C weights, and adds three products of matrices, one for each j:

    grad (BLOCK_R, BLOCK_O) transposed   times   x (BLOCK_R, BLOCK_C) of the windows' j-th column

cuDNN takes several times as long, and a single product of all windows needs a copy of x for each of
the nine weights. Sums over parts have a fixed order, so results are reproducible.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import divide_up, kernel, power_of_two
from pruned_rnnt.model.kernels.sums import sums_of_parts

_ROWS = 64
_PROGRAMS = 396
# Most output and input channels of a block: three sums of this size fit into registers.
_MOST_OUTPUTS, _MOST_CHANNELS = 128, 32
# A product of matrices needs 16 rows and columns.
_LEAST = 16


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
