"""SwooshL and SwooshR with a mask: forward in one pass, backward in one.

    swoosh(x)  = log(1 + exp(x - shift)) - 0.08 x - offset
    swoosh'(x) = 1 / (1 + exp(shift - x)) - 0.08

Axes: N sequences, T frames, C channels; rows are N * T frames. A program takes a tile:

          C ->
    row   [ . . . . ]   BLOCK_C channels
     |    [ . . . . ]   of BLOCK_R rows, all of their channels if C <= BLOCK_C

torch takes three kernels forward and eight backward, most of them through float32 copies of x.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import INTERPRETED, divide_up, kernel, power_of_two

# Elements of a program; a backward pass has more tensors in registers.
_FORWARD_TILE, _BACKWARD_TILE = 2048, 1024
# Channels of a tile: most widths are a multiple.
_WIDTH = 128
_LOG2_E, _LN_2 = 1.0 / math.log(2.0), math.log(2.0)


@triton.jit
def _log2(x, INTERPRETED: tl.constexpr):
    """In one instruction of the GPU, with an error of 2^-22. Triton's logarithms and divisions take
    up to thirty, so that they and not the memory would decide the time."""
    if INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@kernel("frames")
def _swoosh_kernel(
    x_ptr,
    mask_ptr,
    grad_ptr,
    hidden_ptr,
    grad_x_ptr,
    count,
    frames,
    mask_stride,
    channels,
    shift,
    offset,
    slope,
    HAS_MASK: tl.constexpr,
    HAS_GRAD: tl.constexpr,
    HAS_HIDDEN: tl.constexpr,
    LOG2_E: tl.constexpr,
    LN_2: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """swoosh(x) * mask if HAS_HIDDEN; the gradient of x if HAS_GRAD.

    Both are zero where the mask is, also if x or the gradient is not finite there.
    """
    first = tl.program_id(0) * BLOCK_R
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    # Places are relative to the tile, so that they and their mask take 32 bits.
    base = first.to(tl.int64) * channels
    place = tl.arange(0, BLOCK_R)[:, None] * channels + channel[None, :]
    left = tl.minimum(count - base, BLOCK_R * channels).to(tl.int32)
    inside = (channel < channels)[None, :] & (place < left)
    x = tl.load(x_ptr + base + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_GRAD:
        grad = tl.load(grad_ptr + base + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_MASK:
        sequence = (first + tl.arange(0, BLOCK_R)) // frames
        of_mask = sequence[:, None] * mask_stride + channel[None, :]
        mask = tl.load(mask_ptr + of_mask, mask=inside, other=0.0)
    # exp(-|z|) cannot overflow: log(1 + exp(z)) = max(z, 0) + log(1 + exp(-|z|)).
    z = x - shift
    log2 = _log2(1.0 + tl.exp2(tl.abs(z) * -LOG2_E), INTERPRETED)
    if HAS_HIDDEN:
        value = tl.maximum(z, 0.0) + (LN_2 * log2 - slope * x - offset)
        if HAS_MASK:
            value = tl.where(mask == 0.0, 0.0, value * mask)
        tl.store(hidden_ptr + base + place, value.to(hidden_ptr.dtype.element_ty), mask=inside)
    if HAS_GRAD:
        if HAS_MASK:
            grad = tl.where(mask == 0.0, 0.0, grad * mask)
        sigmoid = tl.exp2(tl.minimum(z, 0.0) * LOG2_E - log2)
        grad_x = grad * (sigmoid - slope)
        tl.store(grad_x_ptr + base + place, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)


def swoosh_forward(
    x: Tensor,
    mask_N1C: Tensor | None,
    constants: tuple[float, float, float],
    dtype: torch.dtype,
) -> Tensor:
    """swoosh(x) * mask in `dtype`.

    Args:
        x: (N, ..., C), dense in any memory order; contiguous if there is a mask.
        mask_N1C: (N, 1, C) float32, the same for all frames of a sequence; the channels may be a
            slice of a wider tensor.
        constants: shift, offset and slope.
    """
    out = torch.empty_like(x, dtype=dtype)
    _launch(x, mask_N1C, constants, hidden=out)
    return out


def swoosh_backward(
    x: Tensor,
    mask_N1C: Tensor | None,
    grad: Tensor,
    constants: tuple[float, float, float],
    hidden_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """grad * mask * swoosh'(x) in the dtype of x, and swoosh(x) * mask in `hidden_dtype` if given.

    Args:
        x, mask_N1C, constants: see `swoosh_forward`.
        grad: of swoosh(x) * mask, in the memory order of x.
    """
    grad_x = torch.empty_like(x)
    hidden = None if hidden_dtype is None else torch.empty_like(x, dtype=hidden_dtype)
    _launch(x, mask_N1C, constants, grad=grad, hidden=hidden, grad_x=grad_x)
    return grad_x, hidden


def _launch(
    x: Tensor,
    mask_N1C: Tensor | None,
    constants: tuple[float, float, float],
    *,
    grad: Tensor | None = None,
    hidden: Tensor | None = None,
    grad_x: Tensor | None = None,
) -> None:
    """Write swoosh(x) * mask to `hidden`, and the gradient of x, given `grad`, to `grad_x`."""
    count = x.numel()
    # Without a mask, rows may be any equal parts of the memory.
    channels = _WIDTH if mask_N1C is None else x.size(-1)
    rows = divide_up(count, channels)
    frames, mask_stride = 1, 0
    if mask_N1C is not None:
        frames, mask_stride = rows // x.size(0), mask_N1C.stride(0)
    block_c = min(power_of_two(channels), _WIDTH)
    block_r = max((_FORWARD_TILE if grad is None else _BACKWARD_TILE) // block_c, 1)
    _swoosh_kernel(
        (divide_up(rows, block_r), divide_up(channels, block_c)),
        x,
        mask_N1C,
        grad,
        hidden,
        grad_x,
        count,
        frames,
        mask_stride,
        channels,
        *constants,
        mask_N1C is not None,
        grad is not None,
        hidden is not None,
        _LOG2_E,
        _LN_2,
        INTERPRETED,
        block_r,
        block_c,
    )
