"""The gradient of a whitener that the device switches on and off.

For rows x_r of C channels of a group g, with mean m_g,

    S_g   = sum_r (x_r - m_g)^T (x_r - m_g)                       (C, C)
          = sum_r y_r^T y_r - (sum_r y_r)^T (sum_r y_r) / R,  y_r = x_r - x_0
    trace = sum_g tr S_g,  centre = sum_g |S_g|^2 / trace
    over  = centre >= trace * limit / (G C)
    push  = (x - m_g) (S_g - centre I) / trace
    grad += strength * |grad| / |push| * push                     if over

Axes: R rows (all frames of a batch), G groups, C channels of a group, P parts of the rows. The
four kernels, with what each reads and writes:

    scatter  x (R, G, C) -> y^T y and sums of y over each part, (P, G, C, C) and (P, G, C)
    reduce   these -> S (G, C, C), means (G, C), and per program the sums of S^2 and of diagonals
    push     x, S -> over, push (R, G, C), and per program the sums of push^2 and of grad^2
    apply    grad (R, G, C) in place

    part 0   [ g = 0 ]  [ g = 1 ] ...    part_rows rows of C channels; a program of `scatter`
    part 1   [ g = 0 ]  [ g = 1 ] ...    makes one tile of the C x C sums of a part and group

Row 0 is subtracted because activations often vary little around a large mean: in float32, the
difference of the sums of x itself would then be mostly rounding errors.

A CUDA graph always launches all four. `settings` on the device holds the switch for a whitener that
was within its limit at its last check, the switch for one that was over, and the limit. If the
switch is 0, each kernel returns after reading it; if the metric is within the limit, so do the last
two. The last two read the switch from `active`, a copy, because the third changes `over`. In most
launches the switch is 0, so few programs share all rows: thousands take microseconds to return.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import divide_up, kernel
from pruned_rnnt.model.kernels.rows import as_rows
from pruned_rnnt.model.kernels.whiten_scatter import (
    BLOCK,
    PROGRAMS,
    REDUCED,
    Scatter,
    scatter_matrices,
)

_APPLIED = 4096
_TINY = 1e-20


@triton.jit
def _sum_of(ptr, count, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += tl.load(ptr + place, mask=place < count, other=0.0)
    return tl.sum(total, axis=0)


@kernel("rows", "turns", "count", "G")
def _push_kernel(
    x_ptr,
    grad_ptr,
    total_ptr,
    means_ptr,
    squares_ptr,
    diagonals_ptr,
    settings_ptr,
    over_ptr,
    active_ptr,
    push_ptr,
    push_squares_ptr,
    grad_squares_ptr,
    rows,
    x_stride,
    turns,
    count,
    G,
    C,
    TINY: tl.constexpr,
    SUMMED: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if tl.load(active_ptr) > 0.0:
        trace = _sum_of(diagonals_ptr, count, SUMMED) + TINY
        centre = _sum_of(squares_ptr, count, SUMMED) / trace
        over = centre >= trace * (tl.load(settings_ptr + 2) / (G * C))
        group = tl.program_id(2)
        if tl.program_id(0) + tl.program_id(1) + group == 0:
            tl.store(over_ptr, over.to(tl.uint8))
        if over:
            scale = 1.0 / trace
            column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            push_squares = tl.zeros((BLOCK,), dtype=tl.float32)
            grad_squares = tl.zeros((BLOCK,), dtype=tl.float32)
            for turn in range(turns):
                tile = turn * tl.num_programs(0) + tl.program_id(0)
                row = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
                real = (row < rows)[:, None]
                push = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
                for start in range(0, C, BLOCK):
                    channel = start + tl.arange(0, BLOCK)
                    x = tl.load(
                        x_ptr + row[:, None] * x_stride + group * C + channel[None, :],
                        mask=real & (channel < C)[None, :],
                        other=0.0,
                    )
                    mean = tl.load(means_ptr + group * C + channel, mask=channel < C, other=0.0)
                    centred = (x.to(tl.float32) - mean[None, :]).to(x_ptr.dtype.element_ty)
                    matrix = tl.load(
                        total_ptr + group * C * C + channel[:, None] * C + column[None, :],
                        mask=(channel < C)[:, None] & (column < C)[None, :],
                        other=0.0,
                    )
                    matrix -= tl.where(channel[:, None] == column[None, :], centre, 0.0)
                    matrix = (matrix * scale).to(x_ptr.dtype.element_ty)
                    push = tl.dot(centred, matrix, push, input_precision=PRECISION)
                inside = real & (column < C)[None, :]
                push = tl.where(inside, push, 0.0)
                place = row[:, None] * (G * C) + group * C + column[None, :]
                tl.store(push_ptr + place, push.to(push_ptr.dtype.element_ty), mask=inside)
                grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
                push_squares += tl.sum(push * push, axis=1)
                grad_squares += tl.sum(grad * grad, axis=1)
            program = tl.program_id(0) * tl.num_programs(1) * G + tl.program_id(1) * G + group
            tl.store(push_squares_ptr + program, tl.sum(push_squares, axis=0))
            tl.store(grad_squares_ptr + program, tl.sum(grad_squares, axis=0))


@kernel("count", "programs", "turns")
def _apply_kernel(
    grad_ptr,
    push_ptr,
    push_squares_ptr,
    grad_squares_ptr,
    over_ptr,
    active_ptr,
    count,
    programs,
    turns,
    strength,
    TINY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if (tl.load(active_ptr) > 0.0) & (tl.load(over_ptr) != 0):
        of_grad = tl.sqrt(_sum_of(grad_squares_ptr, programs, 1024))
        factor = strength * of_grad / (tl.sqrt(_sum_of(push_squares_ptr, programs, 1024)) + TINY)
        for turn in range(turns):
            tile = turn * tl.num_programs(0) + tl.program_id(0)
            place = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            push = tl.load(push_ptr + place, mask=place < count, other=0.0).to(tl.float32)
            grad = tl.load(grad_ptr + place, mask=place < count, other=0.0).to(tl.float32)
            grad += factor * push
            tl.store(grad_ptr + place, grad.to(grad_ptr.dtype.element_ty), mask=place < count)


def whiten_scatter(x: Tensor, settings: Tensor, over_limit: Tensor, *, groups: int) -> Scatter:
    """What `whiten_gradient` needs to know of x, which may be launched long before."""
    return scatter_matrices(
        as_rows(x),
        settings,
        over_limit.view(torch.uint8),
        groups=groups,
        channels=x.size(-1) // groups,
        precision=_precision(x),
    )


def _precision(x: Tensor) -> str:
    return "tf32x3" if x.dtype == torch.float32 else "ieee"


def whiten_gradient(
    x: Tensor,
    grad: Tensor,
    settings: Tensor,
    over_limit: Tensor,
    *,
    groups: int,
    strength: float,
    scatter: Scatter | None = None,
) -> None:
    """Change `grad` and `over_limit` in place if the switch is on.

    Args:
        x, grad: (..., G * C); `grad` is contiguous.
        settings: (3,) float32: the switch after a check within the limit, the switch after one
            over the limit, and the limit.
        over_limit: () bool, the result of the last check.
        groups: G.
        scatter: of `whiten_scatter`, if it was called before.
    """
    if scatter is None:
        scatter = whiten_scatter(x, settings, over_limit, groups=groups)
    rows = as_rows(x)
    channels = x.size(-1) // groups
    over = over_limit.view(torch.uint8)
    blocks, row_blocks = divide_up(channels, BLOCK), divide_up(rows.number, BLOCK)
    push = torch.empty(grad.shape, dtype=x.dtype, device=x.device)
    sharing = min(row_blocks, max(PROGRAMS // (blocks * groups), 1))
    programs = sharing * blocks * groups
    push_squares, grad_squares = (
        torch.empty((programs,), dtype=torch.float32, device=x.device) for _ in range(2)
    )
    _push_kernel(
        (sharing, blocks, groups),
        rows.tensor,
        grad,
        scatter.total,
        scatter.means,
        scatter.squares,
        scatter.diagonals,
        settings,
        over,
        scatter.active,
        push,
        push_squares,
        grad_squares,
        rows.number,
        rows.stride,
        divide_up(row_blocks, sharing),
        groups * scatter.pieces,
        groups,
        channels,
        _TINY,
        REDUCED,
        BLOCK,
        _precision(x),
    )
    tiles = divide_up(grad.numel(), _APPLIED)
    shared = min(tiles, PROGRAMS)
    _apply_kernel(
        (shared,),
        grad,
        push,
        push_squares,
        grad_squares,
        over,
        scatter.active,
        grad.numel(),
        programs,
        divide_up(tiles, shared),
        strength,
        _TINY,
        _APPLIED,
    )
