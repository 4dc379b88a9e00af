"""Depthwise convolution of feature maps (N, T, F, C) over time and frequency, forward only.

    out[n, t, f, c] = bias[c] + sum_ij weight[i, j, c] * x[n, t + i - P, f + j - P, c]

with K = 2 P + 1, and zero outside of the T frames and F bins, so x needs no padded copy.

Axes: N sequences, T frames, F bins, C channels, K x K weights; positions are T * F. A program takes
a tile of positions and channels, and reads it K * K times from cache:

              C ->
    position  [ . . . . ]   BLOCK_C channels
       |      [ . . . . ]   of BLOCK_P positions
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import divide_up, kernel, power_of_two

_TILE = 2048
# A warp then reads rows of whole cache lines, and loads weights without a barrier.
_MOST_CHANNELS = 64


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
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    base = tl.program_id(2).to(tl.int64) * positions * C
    position = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    has_channel = channel < C
    frame, bin = position // F, position % F
    total = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
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


def depthwise_maps(x_NTFC: Tensor, weight_KKC: Tensor, bias_C: Tensor) -> Tensor:
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
        block_p,
        block_c,
    )
    return out
