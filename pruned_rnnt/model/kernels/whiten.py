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
    part 1   [ g = 0 ]  [ g = 1 ] ...    makes one tile of the C x C sums of a part and group,
                                         and its mirror image

Row 0 is subtracted because activations often vary little around a large mean: in float32, the
difference of the sums of x itself would then be mostly rounding errors.

A CUDA graph always launches all four. `settings` on the device holds the switch for a whitener that
was within its limit at its last check, the switch for one that was over, and the limit. If the
switch is 0, each kernel returns after reading it; if the metric is within the limit, so do the last
two. The last two read the switch from `active`, a copy, because the third changes `over`. In most
launches the switch is 0, so few programs share all rows: thousands take microseconds to return.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import INTERPRETED, divide_up, kernel
from pruned_rnnt.model.kernels.rows import Rows, as_rows
from pruned_rnnt.model.kernels.target import shared_bytes

# Elements of a tile in one direction, and rows of one of `push` in half precision.
_BLOCK, _ROWS = 64, 128
# Shared memory for such tiles in float32. GPUs of computers and workstations have less.
_SHARED_BYTES_OF_FLOATS = 2**17
# Elements of a program of `reduce`, the parts that it adds at a time, and elements of `apply`.
_REDUCED, _ADDED, _APPLIED = 512, 4, 4096
# Sums of programs that a later kernel adds at a time.
_SUMMED = 1024
_PROGRAMS = 528
_TINY = 1e-20


class Scatter(NamedTuple):
    """S (G, C, C) and means (G, C); the sums of S^2 and of diagonals of each program, of which
    there are `pieces` for a group; and (1,), the switch. All float32, undefined if that is 0."""

    total: Tensor
    means: Tensor
    squares: Tensor
    diagonals: Tensor
    active: Tensor
    pieces: int


@triton.jit
def _switch(settings_ptr, over_ptr):
    """1 if this whitener acts on this batch; likelier if its last check was over the limit."""
    return tl.where(tl.load(over_ptr) != 0, tl.load(settings_ptr + 1), tl.load(settings_ptr))


@triton.jit
def _shifted(place, of_first_row, inside):
    """A tile of x minus its first row, in the dtype of x; 0 outside."""
    x = tl.load(place, mask=inside, other=0.0)
    difference = x.to(tl.float32) - of_first_row.to(tl.float32)[None, :]
    return tl.where(inside, difference, 0.0).to(x.dtype)


@kernel("rows", "part_rows", "G", "blocks")
def _scatter_kernel(
    x_ptr,
    settings_ptr,
    over_ptr,
    scatter_ptr,
    sums_ptr,
    rows,
    x_stride,
    part_rows,
    G,
    C,
    blocks,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if _switch(settings_ptr, over_ptr) > 0.0:
        left_block, right_block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
        if left_block > right_block:
            return
        part = tl.program_id(1)
        group = tl.program_id(2)
        left = left_block * BLOCK + tl.arange(0, BLOCK)
        right = right_block * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        sums = tl.zeros((BLOCK,), dtype=tl.float32)
        of_left = tl.load(x_ptr + group * C + left, mask=left < C, other=0.0)
        of_right = tl.load(x_ptr + group * C + right, mask=right < C, other=0.0)
        begin = part.to(tl.int64) * part_rows
        for start in range(0, part_rows, BLOCK):
            row = begin + start + tl.arange(0, BLOCK)
            place = x_ptr + row[:, None] * x_stride + group * C
            real = (row < rows)[:, None]
            y = _shifted(place + left[None, :], of_left, real & (left < C)[None, :])
            z = _shifted(place + right[None, :], of_right, real & (right < C)[None, :])
            total = tl.dot(tl.trans(y), z, total, input_precision=PRECISION)
            sums += tl.sum(y.to(tl.float32), axis=0)
        base = (part * G + group).to(tl.int64)
        scatter_ptr += base * C * C
        inside = (left < C)[:, None] & (right < C)[None, :]
        tl.store(scatter_ptr + left[:, None] * C + right[None, :], total, mask=inside)
        if left_block < right_block:
            place = scatter_ptr + right[:, None] * C + left[None, :]
            tl.store(place, tl.trans(total), mask=tl.trans(inside))
        else:
            tl.store(sums_ptr + base * C + left, sums, mask=left < C)


@kernel("rows", "parts", "G")
def _reduce_kernel(
    x_ptr,
    scatter_ptr,
    sums_ptr,
    settings_ptr,
    over_ptr,
    total_ptr,
    means_ptr,
    squares_ptr,
    diagonals_ptr,
    active_ptr,
    rows,
    parts,
    G,
    C,
    ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    active = _switch(settings_ptr, over_ptr)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(active_ptr, active)
    if active > 0.0:
        group = tl.program_id(1)
        element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = element < C * C
        left, right = element // C, element % C
        totals = tl.zeros((ADDED, BLOCK), dtype=tl.float32)
        of_lefts = tl.zeros((ADDED, BLOCK), dtype=tl.float32)
        of_rights = tl.zeros((ADDED, BLOCK), dtype=tl.float32)
        for start in range(0, parts, ADDED):
            part = start + tl.arange(0, ADDED)
            base = (part * G + group).to(tl.int64)[:, None]
            real = (part < parts)[:, None] & inside[None, :]
            totals += tl.load(scatter_ptr + base * C * C + element[None, :], mask=real, other=0.0)
            of_lefts += tl.load(sums_ptr + base * C + left[None, :], mask=real, other=0.0)
            of_rights += tl.load(sums_ptr + base * C + right[None, :], mask=real, other=0.0)
        of_left, of_right = tl.sum(of_lefts, axis=0), tl.sum(of_rights, axis=0)
        total = tl.sum(totals, axis=0) - of_left * (of_right / rows)
        total = tl.where(inside, total, 0.0)
        tl.store(total_ptr + group * C * C + element, total, mask=inside)
        # Each mean is stored once: row 0 of the matrix has all C channels as columns.
        first = tl.load(x_ptr + group * C + right, mask=inside, other=0.0).to(tl.float32)
        tl.store(means_ptr + group * C + right, first + of_right / rows, mask=inside & (left == 0))
        program = group * tl.num_programs(0) + tl.program_id(0)
        tl.store(squares_ptr + program, tl.sum(total * total, axis=0))
        tl.store(diagonals_ptr + program, tl.sum(tl.where(left == right, total, 0.0), axis=0))


def _block(x: Tensor) -> int:
    """Rows and channels of a tile of x: what fits in the shared memory of the GPU."""
    if x.dtype != torch.float32 or INTERPRETED:
        return _BLOCK
    return _BLOCK // 2 if shared_bytes() < _SHARED_BYTES_OF_FLOATS else _BLOCK


def _scatter_matrices(
    rows: Rows, settings: Tensor, over: Tensor, *, groups: int, channels: int, precision: str
) -> Scatter:
    """By the first two kernels; over is uint8, precision that of products."""
    block = _block(rows.tensor)
    blocks = divide_up(channels, block)
    row_blocks = divide_up(rows.number, block)
    # The sums of products are symmetric: a program makes two tiles of them.
    tiles = blocks * (blocks + 1) // 2
    parts = max(min(_PROGRAMS // (tiles * groups), row_blocks), 1)
    part_rows = divide_up(row_blocks, parts) * block
    pieces = divide_up(channels * channels, _REDUCED)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=settings.device)

    scatter, sums = floats(parts, groups, channels, channels), floats(parts, groups, channels)
    _scatter_kernel(
        (blocks * blocks, parts, groups),
        rows.tensor,
        settings,
        over,
        scatter,
        sums,
        rows.number,
        rows.stride,
        part_rows,
        groups,
        channels,
        blocks,
        block,
        precision,
    )
    results = Scatter(
        total=floats(groups, channels, channels),
        means=floats(groups, channels),
        squares=floats(groups * pieces),
        diagonals=floats(groups * pieces),
        active=floats(1),
        pieces=pieces,
    )
    _reduce_kernel(
        (pieces, groups),
        rows.tensor,
        scatter,
        sums,
        settings,
        over,
        results.total,
        results.means,
        results.squares,
        results.diagonals,
        results.active,
        rows.number,
        parts,
        groups,
        channels,
        _ADDED,
        _REDUCED,
    )
    return results


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
    BLOCK_R: tl.constexpr,
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
            push_squares = tl.zeros((BLOCK_R,), dtype=tl.float32)
            grad_squares = tl.zeros((BLOCK_R,), dtype=tl.float32)
            for turn in range(turns):
                tile = turn * tl.num_programs(0) + tl.program_id(0)
                row = tile.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
                real = (row < rows)[:, None]
                push = tl.zeros((BLOCK_R, BLOCK), dtype=tl.float32)
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
    SUMMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if (tl.load(active_ptr) > 0.0) & (tl.load(over_ptr) != 0):
        of_grad = tl.sqrt(_sum_of(grad_squares_ptr, programs, SUMMED))
        factor = strength * of_grad / (tl.sqrt(_sum_of(push_squares_ptr, programs, SUMMED)) + TINY)
        for turn in range(turns):
            tile = turn * tl.num_programs(0) + tl.program_id(0)
            place = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            push = tl.load(push_ptr + place, mask=place < count, other=0.0).to(tl.float32)
            grad = tl.load(grad_ptr + place, mask=place < count, other=0.0).to(tl.float32)
            grad += factor * push
            tl.store(grad_ptr + place, grad.to(grad_ptr.dtype.element_ty), mask=place < count)


def whiten_scatter(x: Tensor, settings: Tensor, over_limit: Tensor, *, groups: int) -> Scatter:
    """What `whiten_gradient` needs to know of x, which may be launched long before."""
    return _scatter_matrices(
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
    block = _block(rows.tensor)
    block_rows = block if x.dtype == torch.float32 else _ROWS
    blocks, row_blocks = divide_up(channels, block), divide_up(rows.number, block_rows)
    push = torch.empty(grad.shape, dtype=x.dtype, device=x.device)
    sharing = min(row_blocks, max(_PROGRAMS // (blocks * groups), 1))
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
        _SUMMED,
        block_rows,
        block,
        _precision(x),
        num_warps=8,
    )
    tiles = divide_up(grad.numel(), _APPLIED)
    shared = min(tiles, _PROGRAMS)
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
        _SUMMED,
        _APPLIED,
    )
