"""The gate and the depthwise convolution of a convolution module, for (N, T, E) tensors.

    gated[n, t, e] = a[n, t, e] * sigmoid(b[n, t, e]) * real[n, t]      (a, b) = x[n, t, :]
    out[n, t, e]   = bias[e] + sum_k weight[e, k] * x[n, t + k - P, e],  zero outside 0 .. T - 1

With chunks of C frames, also zero where floor((t + k - P) / C) differs from floor(t / C).

Axes: N sequences, T frames, E channels, K kernel size, P padding; T' = T + P + P' - K + 1 frames of
the output. A program, of one warp, takes some channels and the frames of TURNS * AHEAD results. It
reads each frame once, AHEAD frames a turn, and keeps a window of them in registers, with all
weights:

    t - P   [ 0     ] ^
            [ ..    ] | K - 1 frames of earlier turns           out[t + 1] = sum_k weight[k] *
            [ K - 2 ] v                                                      window[k + 1]
            [ K - 1 ] ^
            [ ..    ] v AHEAD frames of this turn

torch's kernels need contiguous frames (N, E, T), which takes two copies of x and of its gradient.
Gradients of weight and bias are summed over frames in a fixed order, so results are reproducible.
"""

# ruff: noqa: RUF005  Triton has no starred expressions.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import Kernel, divide_up, kernel
from pruned_rnnt.model.kernels.rows import own_tile, row_tiles, sums_of_parts

_TILE = 2048
# Frames that a program of a depthwise convolution reads in a turn, and its turns; the turns of a
# program that sums over frames.
_AHEAD, _TURNS, _SUMMED_TURNS = 4, 8, 16
# Chunks make more code for each of the frames.
_AHEAD_IN_CHUNKS = 2
# Weights of which two channels of a thread fit into registers, with the window.
_FEW_WEIGHTS = 33


@kernel("rows")
def _gate_kernel(x_ptr, real_ptr, out_ptr, rows, E, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr):
    row, channel, inside = own_tile(rows, E, BLOCK_R, BLOCK_E)
    real = tl.load(real_ptr + row, mask=row < rows, other=0)
    place = row[:, None] * (2 * E) + channel[None, :]
    value = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x_ptr + place + E, mask=inside, other=0.0).to(tl.float32)
    out = tl.where((real != 0)[:, None], value * tl.sigmoid(gate), 0.0)
    out_place = row[:, None] * E + channel[None, :]
    tl.store(out_ptr + out_place, out.to(out_ptr.dtype.element_ty), mask=inside)


@kernel("rows")
def _gate_backward_kernel(
    x_ptr,
    real_ptr,
    grad_ptr,
    grad_x_ptr,
    rows,
    E,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    row, channel, inside = own_tile(rows, E, BLOCK_R, BLOCK_E)
    real = tl.load(real_ptr + row, mask=row < rows, other=0)
    place = row[:, None] * (2 * E) + channel[None, :]
    value = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    open_share = tl.sigmoid(tl.load(x_ptr + place + E, mask=inside, other=0.0).to(tl.float32))
    grad_place = row[:, None] * E + channel[None, :]
    grad = tl.load(grad_ptr + grad_place, mask=inside, other=0.0).to(tl.float32)
    grad = tl.where((real != 0)[:, None], grad, 0.0)
    of_value = grad * open_share
    of_gate = of_value * value * (1.0 - open_share)
    tl.store(grad_x_ptr + place, of_value.to(grad_x_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_x_ptr + place + E, of_gate.to(grad_x_ptr.dtype.element_ty), mask=inside)


def gate(x_NTC: Tensor, real_NT1: Tensor) -> Tensor:
    """(N, T, 2 E) -> (N, T, E); `real_NT1` is bool; both contiguous."""
    out = x_NTC.new_empty((*x_NTC.shape[:-1], x_NTC.size(-1) // 2))
    _launch_gate(_gate_kernel, x_NTC, real_NT1, out)
    return out


def gate_backward(x_NTC: Tensor, real_NT1: Tensor, grad_NTE: Tensor) -> Tensor:
    """The gradient of x."""
    grad_x = torch.empty_like(x_NTC)
    _launch_gate(_gate_backward_kernel, x_NTC, real_NT1, grad_NTE, grad_x)
    return grad_x


def _launch_gate(gate_kernel: Kernel, x_NTC: Tensor, real_NT1: Tensor, *others: Tensor) -> None:
    """Launch a kernel of the gate on all rows; the first of the others is (N, T, E)."""
    width = others[0].size(-1)
    rows = others[0].numel() // width
    tiles = row_tiles(rows, width, _TILE)
    real = real_NT1.view(torch.uint8)
    gate_kernel((tiles.number,), x_NTC, real, *others, rows, width, tiles.rows, tiles.channels)


@triton.jit
def _row(ptr, frame, frames, channel, E):
    """A frame of some channels in float32; 0 if it is not one of the sequence."""
    inside = (channel < E) & (frame >= 0) & (frame < frames)
    return tl.load(ptr + frame * E + channel, mask=inside, other=0.0).to(tl.float32)


@kernel("frames", "out_frames", "shift")
def _depthwise_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    chunk_ptr,
    out_ptr,
    frames,
    out_frames,
    shift,
    E,
    K: tl.constexpr,
    IS_FLIPPED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    TURNS: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """out[t] = bias + sum_k weight[k] * x[t + k + shift], or with weight[K - 1 - k]."""
    sequence = tl.program_id(2).to(tl.int64)
    frame = tl.program_id(0) * (TURNS * AHEAD)
    channel = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    has_channel = channel < E
    x_ptr += sequence * frames * E
    out_ptr += sequence * out_frames * E
    chunk = tl.load(chunk_ptr).to(tl.int32) if HAS_CHUNK else 1
    bias = tl.zeros((BLOCK_E,), dtype=tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + channel, mask=has_channel, other=0.0).to(tl.float32)
    weights = ()
    for k in tl.static_range(K):
        place = weight_ptr + channel * K + ((K - 1 - k) if IS_FLIPPED else k)
        weights = weights + (tl.load(place, mask=has_channel, other=0.0).to(tl.float32),)
    window = ()
    for k in tl.static_range(K - 1):
        window = window + (_row(x_ptr, frame + k + shift, frames, channel, E),)
    for _ in range(TURNS):
        for ahead in tl.static_range(AHEAD):
            source = frame + ahead + (K - 1) + shift
            window = window + (_row(x_ptr, source, frames, channel, E),)
        for ahead in tl.static_range(AHEAD):
            total = bias
            begin = (frame + ahead) // chunk * chunk - (frame + ahead + shift)
            for k in tl.static_range(K):
                x = window[k + ahead]
                if HAS_CHUNK:
                    x = tl.where((k >= begin) & (k < begin + chunk), x, 0.0)
                total += x * weights[k]
            place = out_ptr + (frame + ahead) * E + channel
            inside = has_channel & (frame + ahead < out_frames)
            tl.store(place, total.to(out_ptr.dtype.element_ty), mask=inside)
        window = window[AHEAD:]
        frame += AHEAD


@kernel("frames", "out_frames", "padding")
def _depthwise_weight_kernel(
    x_ptr,
    grad_ptr,
    chunk_ptr,
    of_weight_ptr,
    of_bias_ptr,
    frames,
    out_frames,
    padding,
    E,
    K: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    TURNS: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """of_weight[k] = sum_t grad[t] * x[t + k - P] over the frames of a program."""
    sequence = tl.program_id(2).to(tl.int64)
    frame = tl.program_id(0) * (TURNS * AHEAD)
    channel = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    x_ptr += sequence * frames * E
    grad_ptr += sequence * out_frames * E
    chunk = tl.load(chunk_ptr).to(tl.int32) if HAS_CHUNK else 1
    of_bias = tl.zeros((BLOCK_E,), dtype=tl.float32)
    of_weight = ()
    for _ in tl.static_range(K):
        of_weight = of_weight + (tl.zeros((BLOCK_E,), dtype=tl.float32),)
    window = ()
    for k in tl.static_range(K - 1):
        window = window + (_row(x_ptr, frame + k - padding, frames, channel, E),)
    for _ in range(TURNS):
        grads = ()
        for ahead in tl.static_range(AHEAD):
            source = frame + ahead + (K - 1) - padding
            window = window + (_row(x_ptr, source, frames, channel, E),)
            grads = grads + (_row(grad_ptr, frame + ahead, out_frames, channel, E),)
        for ahead in tl.static_range(AHEAD):
            of_bias += grads[ahead]
            begin = (frame + ahead) // chunk * chunk - (frame + ahead - padding)
            sums = ()
            for k in tl.static_range(K):
                x = window[k + ahead]
                if HAS_CHUNK:
                    x = tl.where((k >= begin) & (k < begin + chunk), x, 0.0)
                sums = sums + (of_weight[k] + x * grads[ahead],)
            of_weight = sums
        window = window[AHEAD:]
        frame += AHEAD
    part = sequence * tl.num_programs(0) + tl.program_id(0)
    has_channel = channel < E
    for k in tl.static_range(K):
        tl.store(of_weight_ptr + (part * K + k) * E + channel, of_weight[k], mask=has_channel)
    tl.store(of_bias_ptr + part * E + channel, of_bias, mask=has_channel)


def depthwise(
    x_NTE: Tensor, weight_E1K: Tensor, bias_E: Tensor, padding: int, chunk: Tensor | None = None
) -> Tensor:
    """(N, T, E) -> (N, T', E) with `padding` zeros at both ends; all contiguous, of one dtype.

    chunk: (1,) integer on the device, above 0; T' must be T.
    """
    batch, frames, width = x_NTE.shape
    size = weight_E1K.size(2)
    out = x_NTE.new_empty((batch, frames + 2 * padding - size + 1, width))
    _convolve(x_NTE, weight_E1K, bias_E, out, chunk, shift=-padding)
    return out


def depthwise_backward(
    x_NTE: Tensor,
    weight_E1K: Tensor,
    grad_NTE: Tensor,
    padding: int,
    chunk: Tensor | None = None,
) -> Tensor:
    """Gradient of x, of which only the shape and dtype are used."""
    grad_x = torch.empty_like(x_NTE)
    shift = padding - weight_E1K.size(2) + 1
    _convolve(grad_NTE, weight_E1K, None, grad_x, chunk, shift=shift, is_flipped=True)
    return grad_x


def depthwise_weight_gradients(
    x_NTE: Tensor,
    weight_E1K: Tensor,
    grad_NTE: Tensor,
    padding: int,
    chunk: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of the weight (E, 1, K) and of the bias."""
    batch, frames, width = x_NTE.shape
    size, out_frames = weight_E1K.size(2), grad_NTE.size(1)
    turns, ahead = _turns(_SUMMED_TURNS, chunk)
    parts = divide_up(out_frames, turns * ahead)
    of_weight = x_NTE.new_empty((batch * parts, size, width), dtype=torch.float32)
    of_bias = x_NTE.new_empty((batch * parts, width), dtype=torch.float32)
    block_e = _channels_of_program(size)
    _depthwise_weight_kernel(
        (parts, divide_up(width, block_e), batch),
        x_NTE,
        grad_NTE,
        chunk,
        of_weight,
        of_bias,
        frames,
        out_frames,
        padding,
        width,
        size,
        chunk is not None,
        turns,
        ahead,
        block_e,
        num_warps=1,
    )
    dtype = weight_E1K.dtype
    weight_KE = sums_of_parts(of_weight.flatten(1), dtype).view(size, width)
    return weight_KE.t().unsqueeze(1), sums_of_parts(of_bias, dtype)


def _convolve(
    x_NTE: Tensor,
    weight_E1K: Tensor,
    bias_E: Tensor | None,
    out_NTE: Tensor,
    chunk: Tensor | None,
    *,
    shift: int,
    is_flipped: bool = False,
) -> None:
    batch, frames, width = x_NTE.shape
    size, out_frames = weight_E1K.size(2), out_NTE.size(1)
    block_e = _channels_of_program(size)
    turns, ahead = _turns(_TURNS, chunk)
    _depthwise_kernel(
        (divide_up(out_frames, turns * ahead), divide_up(width, block_e), batch),
        x_NTE,
        weight_E1K,
        bias_E,
        chunk,
        out_NTE,
        frames,
        out_frames,
        shift,
        width,
        size,
        is_flipped,
        bias_E is not None,
        chunk is not None,
        turns,
        ahead,
        block_e,
        num_warps=1,
    )


def _turns(turns: int, chunk: Tensor | None) -> tuple[int, int]:
    """Turns of a program, and frames of a turn; of as many frames together with chunks."""
    if chunk is None:
        return turns, _AHEAD
    return turns * _AHEAD // _AHEAD_IN_CHUNKS, _AHEAD_IN_CHUNKS


def _channels_of_program(weights: int) -> int:
    return 64 if weights <= _FEW_WEIGHTS else 32
