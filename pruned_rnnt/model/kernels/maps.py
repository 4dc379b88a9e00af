"""Depthwise convolution of feature maps (N, T, F, C) over time and frequency.

    out[n, t, f, c] = bias[c] + sum_ij weight[i, j, c] * x[n, t + i - P, f + j - P, c]

with K = 2 P + 1, and zero outside of the T frames and F bins, so x needs no padded copy. The
gradient of x is the convolution of the output's gradient with the weights in reverse order, and

    of_weight[i, j, c] = sum_ntf grad[n, t, f, c] * x[n, t + i - P, f + j - P, c]

Axes: N sequences, T frames, F bins, C channels, K x K weights; positions are T * F, rows are all
positions of the batch. A program takes a tile of positions and channels, and reads it K * K times
from cache:

              C ->
    position  [ . . . . ]   BLOCK_C channels
       |      [ . . . . ]   of BLOCK_P positions

For of_weight, the programs of one part of the rows, one for each i and four j, run side by side, so
that they share what the cache holds. Sums over parts have a fixed order, so results are
reproducible. cuDNN's three kernels take several times as long, and need a padded copy of x.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import divide_up, kernel, power_of_two
from pruned_rnnt.model.kernels.rows import sums_of_parts

_TILE = 2048
# A warp then reads rows of whole cache lines, and loads weights without a barrier.
_MOST_CHANNELS = 64
# Programs that share the rows in the sums over them.
_PROGRAMS = 2112


@kernel("frames", "positions")
def _maps_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    frames,
    positions,
    F: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    base = tl.program_id(2).to(tl.int64) * positions * C
    position = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    has_channel = channel < C
    frame, bin = position // F, position % F
    total = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, mask=has_channel, other=0.0).to(tl.float32)[None, :]
    for i in range(K):
        source = frame + i - K // 2
        has_frame = (source >= 0) & (source < frames)
        for j in tl.static_range(K):
            other_bin = bin + j - K // 2
            counts = has_frame & (other_bin >= 0) & (other_bin < F)
            place = base + (source * F + other_bin).to(tl.int64) * C
            inside = counts[:, None] & has_channel[None, :]
            x = tl.load(x_ptr + place[:, None] + channel[None, :], mask=inside, other=0.0)
            weight = tl.load(weight_ptr + (i * K + j) * C + channel, mask=has_channel, other=0.0)
            total += x.to(tl.float32) * weight.to(tl.float32)[None, :]
    out = out_ptr + base + position.to(tl.int64)[:, None] * C + channel[None, :]
    inside = (position < positions)[:, None] & has_channel[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _shifted(x_ptr, row, bin, j, has_source, channel, F, C, K: tl.constexpr):
    """x of the bin j - K // 2 after each row's, (P, C) in float32; zero beyond the bins."""
    source = bin + j - K // 2
    inside = has_source & (source >= 0) & (source < F) & (j < K)
    place = (row + (j - K // 2)) * C
    x = tl.load(
        x_ptr + place[:, None] + channel[None, :],
        mask=inside[:, None] & (channel < C)[None, :],
        other=0.0,
    )
    return x.to(tl.float32)


@kernel("rows", "frames", "turns")
def _maps_weight_kernel(
    x_ptr,
    grad_ptr,
    of_weight_ptr,
    rows,
    frames,
    turns,
    F: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """of_weight (P, K, K, C) over the rows of each part.

    Program (i and a group of four j, part, block of channels).
    """
    i = tl.program_id(0) // GROUPS
    first = tl.program_id(0) % GROUPS * 4
    channel = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    has_channel = channel < C
    total_0 = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    total_1 = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    total_2 = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    total_3 = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    # Positions are relative to the part's first row, so that they take 32 bits.
    start = tl.program_id(1).to(tl.int64) * turns * BLOCK_P
    grad_ptr += start * C
    x_ptr += (start + (i - K // 2) * F) * C
    left = tl.minimum(rows - start, turns * BLOCK_P).to(tl.int32)
    frame_0, bin_0 = ((start // F) % frames).to(tl.int32), (start % F).to(tl.int32)
    for turn in range(turns):
        row = turn * BLOCK_P + tl.arange(0, BLOCK_P)
        bin = (bin_0 + row) % F
        source = (frame_0 + (bin_0 + row) // F) % frames + i - K // 2
        has_source = (row < left) & (source >= 0) & (source < frames)
        grad = tl.load(
            grad_ptr + row[:, None] * C + channel[None, :],
            mask=has_source[:, None] & has_channel[None, :],
            other=0.0,
        ).to(tl.float32)
        total_0 += grad * _shifted(x_ptr, row, bin, first, has_source, channel, F, C, K)
        total_1 += grad * _shifted(x_ptr, row, bin, first + 1, has_source, channel, F, C, K)
        total_2 += grad * _shifted(x_ptr, row, bin, first + 2, has_source, channel, F, C, K)
        total_3 += grad * _shifted(x_ptr, row, bin, first + 3, has_source, channel, F, C, K)
    out = of_weight_ptr + ((tl.program_id(1) * K + i) * K + first) * C + channel
    tl.store(out, tl.sum(total_0, axis=0), mask=has_channel)
    tl.store(out + C, tl.sum(total_1, axis=0), mask=has_channel & (first + 1 < K))
    tl.store(out + 2 * C, tl.sum(total_2, axis=0), mask=has_channel & (first + 2 < K))
    tl.store(out + 3 * C, tl.sum(total_3, axis=0), mask=has_channel & (first + 3 < K))


def depthwise_maps(x_NTFC: Tensor, weight_KKC: Tensor, bias_C: Tensor | None) -> Tensor:
    """(N, T, F, C) -> the same shape; all contiguous; sums are float32."""
    batch, frames, bins, channels = x_NTFC.shape
    out = torch.empty_like(x_NTFC)
    positions = frames * bins
    block_c = min(power_of_two(channels), _MOST_CHANNELS)
    block_p = max(_TILE // block_c, 1)
    _maps_kernel(
        (divide_up(positions, block_p), divide_up(channels, block_c), batch),
        x_NTFC,
        weight_KKC,
        bias_C,
        out,
        frames,
        positions,
        bins,
        channels,
        weight_KKC.size(0),
        bias_C is not None,
        block_p,
        block_c,
    )
    return out


def depthwise_maps_weight(x_NTFC: Tensor, grad_NTFC: Tensor, size: int) -> Tensor:
    """The gradient of the weights, (K, K, C) in the dtype of x; both arguments are contiguous.

    Args:
        size: K.
    """
    batch, frames, bins, channels = x_NTFC.shape
    rows = batch * frames * bins
    groups = divide_up(size, 4)
    block_c = min(power_of_two(channels), _MOST_CHANNELS)
    block_p = max(_TILE // block_c, 1)
    blocks, tiles = divide_up(channels, block_c), divide_up(rows, block_p)
    turns = divide_up(tiles, min(tiles, max(_PROGRAMS // (blocks * groups * size), 1)))
    parts = divide_up(tiles, turns)
    of_weight = x_NTFC.new_empty((parts, size * size * channels), dtype=torch.float32)
    _maps_weight_kernel(
        (size * groups, parts, blocks),
        x_NTFC,
        grad_NTFC,
        of_weight,
        rows,
        frames,
        turns,
        bins,
        channels,
        size,
        groups,
        block_p,
        block_c,
    )
    return sums_of_parts(of_weight, x_NTFC.dtype).view(size, size, channels)
