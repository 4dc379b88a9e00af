"""The gradient of a balancer that the device switches on and off.

    grad += strength * |grad| * (offset[c] + slope[c] * x)

offset and slope are the normalised gradient of the balancer's penalty; they follow from the mean
and the mean square of each channel c (see `pruned_rnnt.model.zipformer.balancer`).

Axes: R rows (all frames of a batch), C channels, P parts of the rows. Two kernels:

    sums   x (R, C) -> sums of x and of x^2 over each part, (P, 2, C)
    apply  sums -> offset and slope of the channels of a program; grad (R, C) in place

          C ->
    row   [ 0 ] [ 0 ] ...    tiles of BLOCK_R rows and BLOCK_C channels; program p of `sums`
     |    [ 1 ] [ 1 ] ...    adds up every P-th tile of its channels, as part p
     v    [ . ] [ . ] ...

A CUDA graph always launches both. `settings` on the device holds the switch (0 or 1), the limits of
mean / standard deviation, and the limits of the root mean square; if the switch is 0, each kernel
returns after reading it. Programs have few channels, so that each reads few sums again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import divide_up, kernel, power_of_two
from pruned_rnnt.model.kernels.rows import as_rows, rows_of_turn

_TILE = 4096
_WIDEST = 64
# Programs of a kernel.
_PROGRAMS = 528
# Parts that a program adds at a time.
_ADDED = 32
_TINY = 1e-20


@kernel("rows", "turns")
def _sums_kernel(
    x_ptr,
    settings_ptr,
    sums_ptr,
    rows,
    x_stride,
    turns,
    C,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    if tl.load(settings_ptr) > 0.0:
        channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        # Tiles, because a sum over the rows in each turn would wait for all warps.
        first = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
        second = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
        for turn in range(turns):
            row, inside = rows_of_turn(turn, rows, channel, C, BLOCK_R)
            place = x_ptr + row[:, None] * x_stride + channel[None, :]
            x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            first += x
            second += x * x
        out = sums_ptr + tl.program_id(0) * 2 * C + channel
        tl.store(out, tl.sum(first, axis=0), mask=channel < C)
        tl.store(out + C, tl.sum(second, axis=0), mask=channel < C)


@triton.jit
def _coefficients(
    sums_ptr,
    settings_ptr,
    rows,
    parts,
    channel,
    C,
    TINY: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Offset and slope of channels, (BLOCK_C,) each."""
    first = tl.zeros((ADDED, BLOCK_C), dtype=tl.float32)
    second = tl.zeros((ADDED, BLOCK_C), dtype=tl.float32)
    for start in range(0, parts, ADDED):
        part = start + tl.arange(0, ADDED)
        inside = (part < parts)[:, None] & (channel < C)[None, :]
        place = sums_ptr + part[:, None] * 2 * C + channel[None, :]
        first += tl.load(place, mask=inside, other=0.0)
        second += tl.load(place + C, mask=inside, other=0.0)
    mean = tl.sum(first, axis=0) / rows
    square = tl.sum(second, axis=0) / rows
    rms = tl.sqrt(square)
    to_unit = tl.rsqrt(tl.maximum(square - mean * mean, TINY))
    ratio = mean * to_unit
    # +1 where a statistic is too large, -1 where it is too small, 0 within its limits.
    mean_side = tl.where(ratio > tl.load(settings_ptr + 2), 1.0, 0.0)
    mean_side = tl.where(ratio < tl.load(settings_ptr + 1), -1.0, mean_side)
    rms_side = tl.where(rms > tl.load(settings_ptr + 4), 1.0, 0.0)
    rms_side = tl.where(rms < tl.load(settings_ptr + 3), -1.0, rms_side)
    power = ratio * ratio + 1.0
    offset = mean_side * power
    slope = rms_side / power
    to_size = tl.rsqrt(tl.maximum(offset * mean_side + slope * rms_side, TINY))
    return offset * to_size, (slope - mean_side * ratio) * to_unit * to_size


@kernel("rows", "parts", "turns")
def _apply_kernel(
    grad_ptr,
    x_ptr,
    sums_ptr,
    settings_ptr,
    rows,
    grad_stride,
    x_stride,
    parts,
    turns,
    C,
    strength,
    TINY: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    if tl.load(settings_ptr) > 0.0:
        channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        offset, slope = _coefficients(
            sums_ptr, settings_ptr, rows, parts, channel, C, TINY, ADDED, BLOCK_C
        )
        offset, slope = strength * offset, strength * slope
        for turn in range(turns):
            row, inside = rows_of_turn(turn, rows, channel, C, BLOCK_R)
            x_place = x_ptr + row[:, None] * x_stride + channel[None, :]
            x = tl.load(x_place, mask=inside, other=0.0).to(tl.float32)
            place = grad_ptr + row[:, None] * grad_stride + channel[None, :]
            grad = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            grad += tl.abs(grad) * (offset[None, :] + slope[None, :] * x)
            tl.store(place, grad.to(grad_ptr.dtype.element_ty), mask=inside)


class _Tiling(NamedTuple):
    """Sizes of a tile, and the grid and turns in which programs take all tiles."""

    block_r: int
    block_c: int
    grid: tuple[int, int]
    turns: int


def _tiling(rows: int, channels: int) -> _Tiling:
    block_c = min(power_of_two(channels), _WIDEST)
    block_r = max(_TILE // block_c, 1)
    blocks = divide_up(channels, block_c)
    tiles = divide_up(rows, block_r)
    parts = min(tiles, max(_PROGRAMS // blocks, 1))
    return _Tiling(block_r, block_c, (parts, blocks), divide_up(tiles, parts))


def balance_sums(x: Tensor, settings: Tensor) -> Tensor:
    """What `balance_gradient` needs to know of x (..., C), which may be launched long before."""
    rows, channels = as_rows(x), x.size(-1)
    tiling = _tiling(rows.number, channels)
    sums = torch.empty((tiling.grid[0], 2, channels), dtype=torch.float32, device=x.device)
    _sums_kernel(
        tiling.grid,
        rows.tensor,
        settings,
        sums,
        rows.number,
        rows.stride,
        tiling.turns,
        channels,
        tiling.block_r,
        tiling.block_c,
    )
    return sums


def balance_gradient(
    x: Tensor, grad: Tensor, settings: Tensor, strength: float, sums: Tensor | None = None
) -> None:
    """Change `grad` in place if the switch is on.

    Args:
        x, grad: (..., C); `grad` has rows of one stride.
        settings: (5,) float32: the switch, the lowest and highest mean / standard deviation, the
            lowest and highest root mean square.
        sums: of `balance_sums`, if it was called before.
    """
    if sums is None:
        sums = balance_sums(x, settings)
    x_rows, grad_rows = as_rows(x), as_rows(grad)
    tiling = _tiling(x_rows.number, x.size(-1))
    _apply_kernel(
        tiling.grid,
        grad_rows.tensor,
        x_rows.tensor,
        sums,
        settings,
        x_rows.number,
        grad_rows.stride,
        x_rows.stride,
        tiling.grid[0],
        tiling.turns,
        x.size(-1),
        strength,
        _TINY,
        _ADDED,
        tiling.block_r,
        tiling.block_c,
    )
