"""The gate and the depthwise convolution of a convolution module, for (N, T, E) tensors.

    gated[n, t, e] = a[n, t, e] * sigmoid(b[n, t, e]) * real[n, t]      (a, b) = x[n, t, :]
    out[n, t, e]   = bias[e] + sum_k weight[e, k] * x[n, t + k - P, e],  zero outside 0 .. T - 1

With chunks of C frames, also zero where floor((t + k - P) / C) differs from floor(t / C).

Axes: N sequences, T frames, E channels, K kernel size, P padding; T' = T + P + P' - K + 1 frames of
the output. A program takes a tile of frames and channels, and reads it K times from cache:

            E ->
    t - P   . . . .
       |    [ tile ]     of BLOCK_T frames and BLOCK_E channels
    t + K   . . . .

torch's kernels need contiguous frames (N, E, T), which takes two copies of x and of its gradient.
Gradients of weight and bias are summed over frames in a fixed order, so results are reproducible.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import Kernel, divide_up, kernel, power_of_two
from pruned_rnnt.model.kernels.rows import own_tile, row_tiles, sums_of_parts

_TILE = 2048
# Elements of a tile of the depthwise convolution.
_CONVOLVED = 4096
# Frames over which one program sums.
_SUMMED = 64


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
    STEP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """out[t] = bias + sum_k weight[k] * x[t + STEP * k + shift], for STEP = 1 or -1."""
    sequence = tl.program_id(2).to(tl.int64)
    frame = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    has_channel = channel < E
    total = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, mask=has_channel, other=0.0).to(tl.float32)[None, :]
    x_ptr += sequence * frames * E
    if HAS_CHUNK:
        chunk = tl.load(chunk_ptr).to(tl.int32)
    for k in range(K):
        source = frame + STEP * k + shift
        counts = (source >= 0) & (source < frames)
        if HAS_CHUNK:
            counts = counts & (source // chunk == frame // chunk)
        inside = counts[:, None] & has_channel[None, :]
        x = tl.load(x_ptr + source[:, None] * E + channel[None, :], mask=inside, other=0.0)
        weight = tl.load(weight_ptr + channel * K + k, mask=has_channel, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)[None, :]
    inside = (frame < out_frames)[:, None] & has_channel[None, :]
    place = (sequence * out_frames + frame)[:, None] * E + channel[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)


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
    SUMMED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """of_weight[k] = sum_t grad[t] * x[t + k - P] over SUMMED frames of one sequence."""
    sequence = tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * SUMMED
    channel = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    has_channel = channel < E
    k = tl.arange(0, BLOCK_K)
    of_weight = tl.zeros((BLOCK_K, BLOCK_E), dtype=tl.float32)
    of_bias = tl.zeros((BLOCK_E,), dtype=tl.float32)
    x_ptr += sequence * frames * E
    grad_ptr += sequence * out_frames * E
    if HAS_CHUNK:
        chunk = tl.load(chunk_ptr).to(tl.int32)
    for turn in range(SUMMED):
        frame = first + turn
        counts = has_channel & (frame < out_frames)
        grad = tl.load(grad_ptr + frame * E + channel, mask=counts, other=0.0).to(tl.float32)
        source = frame + k - padding
        inside_K = (source >= 0) & (source < frames)
        if HAS_CHUNK:
            inside_K = inside_K & (source // chunk == frame // chunk)
        inside = inside_K[:, None] & has_channel[None, :]
        x = tl.load(x_ptr + source[:, None] * E + channel[None, :], mask=inside, other=0.0)
        of_weight += x.to(tl.float32) * grad[None, :]
        of_bias += grad
    part = sequence * tl.num_programs(0) + tl.program_id(0)
    place = (part * K + k)[:, None] * E + channel[None, :]
    tl.store(of_weight_ptr + place, of_weight, mask=(k < K)[:, None] & has_channel[None, :])
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
    _convolve(x_NTE, weight_E1K, bias_E, out, chunk, shift=-padding, step=1)
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
    _convolve(grad_NTE, weight_E1K, None, grad_x, chunk, shift=padding, step=-1)
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
    parts = divide_up(out_frames, _SUMMED)
    of_weight = x_NTE.new_empty((batch * parts, size, width), dtype=torch.float32)
    of_bias = x_NTE.new_empty((batch * parts, width), dtype=torch.float32)
    block_e = 64
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
        _SUMMED,
        power_of_two(size),
        block_e,
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
    step: int,
) -> None:
    batch, frames, width = x_NTE.shape
    block_e = 64
    block_t = _CONVOLVED // block_e
    grid = (divide_up(out_NTE.size(1), block_t), divide_up(width, block_e), batch)
    _depthwise_kernel(
        grid,
        x_NTE,
        weight_E1K,
        bias_E,
        chunk,
        out_NTE,
        frames,
        out_NTE.size(1),
        shift,
        width,
        weight_E1K.size(2),
        step,
        bias_E is not None,
        chunk is not None,
        block_t,
        block_e,
    )
