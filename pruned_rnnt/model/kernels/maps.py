"""Depthwise convolution of feature maps (N, T, F, C) over time and frequency.

    out[n, t, f, c] = bias[c] + sum_ij weight[i, j, c] * x[n, t + i - P, f + j - P, c]

with K = 2 P + 1, and zero outside of the T frames and F bins, so x needs no padded copy. The
gradient of x is the convolution of the output's gradient with the weights in reverse order, and

    of_weight[i, j, c] = sum_ntf grad[n, t, f, c] * x[n, t + i - P, f + j - P, c]

Axes: N sequences, T frames, F bins, C channels, K x K weights. A program, of one warp, has the
weights of some channels in registers, and goes from frame to frame. In each it reads the bins that
BINS neighbouring results need, and adds their products to the K frames of results that wait for
them; the sums over all frames and bins need the K newest frames of the gradient instead:

                     bins ->
    frame t - P    . . . . . . .     complete: stored
            ...    . . . . . . .     waiting
          t        . . x x . . .     BINS results for each of K frames
            ...    . . . . . . .     waiting
          t + P    r r r r r r r r   read: BINS + K - 1 bins

Sums over parts of the frames have a fixed order, so results are reproducible. cuDNN's three kernels
take several times as long, and need a padded copy of x.
"""

# ruff: noqa: RUF005  Triton has no starred expressions.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import divide_up, kernel
from pruned_rnnt.model.kernels.rows import sums_of_parts

# Channels of a program, and results in one frame.
_CHANNELS, _BINS = 64, 2
# Frames of results of a program, and programs that share the frames in the sums over them.
_TURNS, _PROGRAMS = 64, 1056


class MapsGradients(NamedTuple):
    """weight_KKC and bias_C, in the dtype of x."""

    weight_KKC: Tensor
    bias_C: Tensor


@triton.jit
def _bin(ptr, has_channel, has_frame, bin, F):
    """The channels of a bin in float32; 0 beyond frames, bins and channels."""
    inside = has_channel & (has_frame & (bin >= 0) & (bin < F))
    return tl.load(ptr, mask=inside, other=0.0).to(tl.float32)


@kernel("frames", "F")
def _maps_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    frames,
    F,
    C: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TURNS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    pairs = tl.cdiv(F, BINS)
    sequence = tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) // pairs * TURNS
    bin = tl.program_id(0) % pairs * BINS
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    has_channel = channel < C
    # Of the first bin that is read and of the first result, in each turn.
    source = sequence * frames + first - K // 2
    sources = x_ptr + (source * F + bin - K // 2) * C + channel
    results = out_ptr + ((sequence * frames + first - (K - 1)) * F + bin) * C + channel
    bias = tl.zeros((BLOCK_C,), dtype=tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + channel, mask=has_channel, other=0.0).to(tl.float32)
    weights = ()
    for k in tl.static_range(K * K):
        weight = tl.load(weight_ptr + k * C + channel, mask=has_channel, other=0.0)
        weights = weights + (weight.to(tl.float32),)
    # Of each bin, the sums of K frames, the oldest first.
    waiting = ()
    for _ in tl.static_range(BINS * K):
        waiting = waiting + (bias,)
    for turn in range(TURNS + K - 1):
        frame = first + turn - K // 2
        has_frame = (frame >= 0) & (frame < frames)
        row = ()
        for j in tl.static_range(BINS + K - 1):
            row = row + (_bin(sources + j * C, has_channel, has_frame, bin + j - K // 2, F),)
        sums = ()
        for k in tl.static_range(BINS * K):
            total = waiting[k]
            for j in tl.static_range(K):
                total += row[k // K + j] * weights[(K - 1 - k % K) * K + j]
            sums = sums + (total,)
        frame = first + turn - (K - 1)
        waiting = ()
        for b in tl.static_range(BINS):
            inside = has_channel & ((turn >= K - 1) & (frame < frames) & (bin + b < F))
            tl.store(results + b * C, sums[b * K].to(out_ptr.dtype.element_ty), mask=inside)
            waiting = waiting + sums[b * K + 1 : b * K + K] + (bias,)
        sources += F * C
        results += F * C


@kernel("frames", "F", "turns")
def _maps_weight_kernel(
    x_ptr,
    grad_ptr,
    parts_ptr,
    frames,
    F,
    turns,
    C: tl.constexpr,
    K: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Parts (P, K * K + 1, C) of the gradients of the weights and of the bias."""
    sequence = tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * turns
    end = tl.minimum(first + turns, frames)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    has_channel = channel < C
    source = (sequence * frames + first - K // 2) * F - K // 2
    result = (sequence * frames + first) * F
    zero = tl.zeros((BLOCK_C,), dtype=tl.float32)
    of_bias = zero
    of_weight = ()
    for _ in tl.static_range(K * K):
        of_weight = of_weight + (zero,)
    for bin in range(0, F, BINS):
        # Of each bin, the gradients of K - 1 frames, the oldest first.
        window = ()
        for _ in tl.static_range(BINS * (K - 1)):
            window = window + (zero,)
        sources = x_ptr + (source + bin) * C + channel
        results = grad_ptr + (result + bin) * C + channel
        for turn in range(turns + K - 1):
            frame = first + turn - K // 2
            has_frame = (frame >= 0) & (frame < frames)
            row = ()
            for j in tl.static_range(BINS + K - 1):
                row = row + (_bin(sources + j * C, has_channel, has_frame, bin + j - K // 2, F),)
            grads = ()
            for b in tl.static_range(BINS):
                newest = _bin(results + b * C, has_channel, first + turn < end, bin + b, F)
                of_bias += newest
                grads = grads + window[b * (K - 1) : (b + 1) * (K - 1)] + (newest,)
            sums = ()
            for k in tl.static_range(K * K):
                total = of_weight[k]
                for b in tl.static_range(BINS):
                    total += grads[b * K + (K - 1 - k // K)] * row[b + k % K]
                sums = sums + (total,)
            of_weight = sums
            window = ()
            for b in tl.static_range(BINS):
                window = window + grads[b * K + 1 : b * K + K]
            sources += F * C
            results += F * C
    part = sequence * tl.num_programs(0) + tl.program_id(0)
    place = parts_ptr + part * (K * K + 1) * C + channel
    for k in tl.static_range(K * K):
        tl.store(place + k * C, of_weight[k], mask=has_channel)
    tl.store(place + K * K * C, of_bias, mask=has_channel)


def depthwise_maps(x_NTFC: Tensor, weight_KKC: Tensor, bias_C: Tensor | None) -> Tensor:
    """(N, T, F, C) -> the same shape; all contiguous; sums are float32."""
    batch, frames, bins, channels = x_NTFC.shape
    out = torch.empty_like(x_NTFC)
    programs = divide_up(frames, _TURNS) * divide_up(bins, _BINS)
    _maps_kernel(
        (programs, divide_up(channels, _CHANNELS), batch),
        x_NTFC,
        weight_KKC,
        bias_C,
        out,
        frames,
        bins,
        channels,
        weight_KKC.size(0),
        bias_C is not None,
        _TURNS,
        _BINS,
        _CHANNELS,
        num_warps=1,
    )
    return out


def depthwise_maps_gradients(x_NTFC: Tensor, grad_NTFC: Tensor, size: int) -> MapsGradients:
    """The gradients of the weights and of the bias; both arguments are contiguous.

    Args:
        size: K.
    """
    batch, frames, bins, channels = x_NTFC.shape
    blocks = divide_up(channels, _CHANNELS)
    turns = divide_up(frames, max(_PROGRAMS // (blocks * batch), 1))
    parts = divide_up(frames, turns)
    of_parts = x_NTFC.new_empty((batch * parts, (size * size + 1) * channels), dtype=torch.float32)
    _maps_weight_kernel(
        (parts, blocks, batch),
        x_NTFC,
        grad_NTFC,
        of_parts,
        frames,
        bins,
        turns,
        channels,
        size,
        _BINS,
        _CHANNELS,
        num_warps=1,
    )
    sums = sums_of_parts(of_parts, x_NTFC.dtype)
    weight, bias = sums[:-channels], sums[-channels:]
    return MapsGradients(weight.view(size, size, channels), bias)
