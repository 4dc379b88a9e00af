"""S, the scatter matrices of whiten.py, by its first two kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import divide_up, kernel
from pruned_rnnt.model.kernels.rows import Rows

# Elements of a tile in one direction.
BLOCK = 64
REDUCED = 1024
PROGRAMS = 528


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
        pair = tl.program_id(0)
        part = tl.program_id(1)
        group = tl.program_id(2)
        left = (pair // blocks) * BLOCK + tl.arange(0, BLOCK)
        right = (pair % blocks) * BLOCK + tl.arange(0, BLOCK)
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
        if pair % blocks == 0:
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


def scatter_matrices(
    rows: Rows, settings: Tensor, over: Tensor, *, groups: int, channels: int, precision: str
) -> Scatter:
    """See whiten_gradient; over is uint8, precision that of products."""
    blocks = divide_up(channels, BLOCK)
    row_blocks = divide_up(rows.number, BLOCK)
    parts = max(min(PROGRAMS // (blocks * blocks * groups), row_blocks), 1)
    part_rows = divide_up(row_blocks, parts) * BLOCK
    pieces = divide_up(channels * channels, REDUCED)

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
        BLOCK,
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
        REDUCED,
    )
    return results
