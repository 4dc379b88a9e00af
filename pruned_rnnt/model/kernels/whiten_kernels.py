"""The four kernels of whiten.py, which has their maths, axes and tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from pruned_rnnt.model.kernels.launch import kernel


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


@kernel("rows", "x_stride", "part_rows")
def scatter_kernel(
    x_ptr,
    settings_ptr,
    over_ptr,
    scatter_ptr,
    sums_ptr,
    rows,
    x_stride,
    part_rows,
    G: tl.constexpr,
    C: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if _switch(settings_ptr, over_ptr) > 0.0:
        pair = tl.program_id(0)
        part = tl.program_id(1)
        group = tl.program_id(2)
        left = (pair // BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        right = (pair % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
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
        place = scatter_ptr + base * C * C + left[:, None] * C + right[None, :]
        tl.store(place, total, mask=(left < C)[:, None] & (right < C)[None, :])
        if pair % BLOCKS == 0:
            tl.store(sums_ptr + base * C + left, sums, mask=left < C)


@kernel("rows", "parts")
def reduce_kernel(
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
    G: tl.constexpr,
    C: tl.constexpr,
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
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        of_left = tl.zeros((BLOCK,), dtype=tl.float32)
        of_right = tl.zeros((BLOCK,), dtype=tl.float32)
        for part in range(parts):
            base = (part * G + group).to(tl.int64)
            total += tl.load(scatter_ptr + base * C * C + element, mask=inside, other=0.0)
            of_left += tl.load(sums_ptr + base * C + left, mask=inside, other=0.0)
            of_right += tl.load(sums_ptr + base * C + right, mask=inside, other=0.0)
        total -= of_left * (of_right / rows)
        total = tl.where(inside, total, 0.0)
        tl.store(total_ptr + group * C * C + element, total, mask=inside)
        # Each mean is stored once: row 0 of the matrix has all C channels as columns.
        first = tl.load(x_ptr + group * C + right, mask=inside, other=0.0).to(tl.float32)
        tl.store(means_ptr + group * C + right, first + of_right / rows, mask=inside & (left == 0))
        program = group * tl.num_programs(0) + tl.program_id(0)
        tl.store(squares_ptr + program, tl.sum(total * total, axis=0))
        tl.store(diagonals_ptr + program, tl.sum(tl.where(left == right, total, 0.0), axis=0))


@triton.jit
def _sum_of(ptr, count, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += tl.load(ptr + place, mask=place < count, other=0.0)
    return tl.sum(total, axis=0)


@kernel("rows", "x_stride", "turns", "count")
def push_kernel(
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
    G: tl.constexpr,
    C: tl.constexpr,
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
def apply_kernel(
    grad_ptr,
    push_ptr,
    push_squares_ptr,
    grad_squares_ptr,
    over_ptr,
    active_ptr,
    count,
    programs,
    turns,
    STRENGTH: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if (tl.load(active_ptr) > 0.0) & (tl.load(over_ptr) != 0):
        of_grad = tl.sqrt(_sum_of(grad_squares_ptr, programs, 1024))
        factor = STRENGTH * of_grad / (tl.sqrt(_sum_of(push_squares_ptr, programs, 1024)) + TINY)
        for turn in range(turns):
            tile = turn * tl.num_programs(0) + tl.program_id(0)
            place = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            push = tl.load(push_ptr + place, mask=place < count, other=0.0).to(tl.float32)
            grad = tl.load(grad_ptr + place, mask=place < count, other=0.0).to(tl.float32)
            grad += factor * push
            tl.store(grad_ptr + place, grad.to(grad_ptr.dtype.element_ty), mask=place < count)
