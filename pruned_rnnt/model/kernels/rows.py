"""Tensors as rows of channels: the tiles of rows that a program takes, and sums over rows.

Sums over rows are gradients of biases, and of parameters of other kernels:

    sums[c] = sum_r x[r, c]

Axes: R rows, C channels, P parts of the rows. Two kernels: x (R, C) -> sums of each part (P, C),
then the sum of these, in a fixed order. torch's kernel takes several times as long for tall
matrices.

          C ->
    row   [ 0 ] [ 0 ] ...    tiles of BLOCK_R rows and BLOCK_C channels; program p of the first
     |    [ 1 ] [ 1 ] ...    kernel adds up every P-th tile of its channels, as part p
     v    [ . ] [ . ] ...

The second kernel also rounds the sums to the dtype of the gradient and moves them towards the
limits of a parameter (see `grad_towards_limits` in `pruned_rnnt.model.zipformer.gradient`), for
which torch takes seven kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import divide_up, kernel, power_of_two

# Programs that share the sums over rows.
_PARTS = 528
# A tile of `column_sums`; the parts that a program of the second kernel adds at a time, and its
# channels: one number for all widths, so that there are few variants to compile.
_ROWS, _WIDTH, _ADDED, _SUMMED = 64, 128, 256, 32


class Rows(NamedTuple):
    """A tensor (..., C) whose row r starts `stride` * r elements after its first element."""

    tensor: Tensor
    number: int
    stride: int


def as_rows(x: Tensor) -> Rows:
    """All channels of one frame are a row; `x` is copied if its rows have no common stride."""
    if not _has_row_stride(x):
        x = x.contiguous()
    return Rows(x, x.numel() // x.size(-1), _row_stride(x))


def _row_stride(x: Tensor) -> int:
    for axis in range(x.dim() - 2, -1, -1):
        if x.size(axis) > 1:
            return x.stride(axis)
    return x.size(-1)


def _has_row_stride(x: Tensor) -> bool:
    if x.size(-1) > 1 and x.stride(-1) != 1:
        return False
    expected = None  # 0 is the stride of an expanded axis
    for axis in range(x.dim() - 2, -1, -1):
        if x.size(axis) == 1:
            continue
        if expected is not None and x.stride(axis) != expected:
            return False
        expected = x.stride(axis) * x.size(axis)
    return True


class RowTiles(NamedTuple):
    """Rows of a tile, its channels rounded up to a power of two, and the tiles of all rows."""

    rows: int
    channels: int
    number: int

    @property
    def parts(self) -> int:
        """Programs that share the tiles, and each write a part of the sums over rows."""
        return min(self.number, _PARTS)

    @property
    def turns(self) -> int:
        """The most tiles that one of `parts` programs takes."""
        return divide_up(self.number, self.parts)


def row_tiles(rows: int, channels: int, elements: int) -> RowTiles:
    """Tiles of whole rows with about `elements` elements each."""
    padded = power_of_two(channels)
    each = max(elements // padded, 1)
    return RowTiles(each, padded, divide_up(rows, each))


@triton.jit
def rows_of_turn(turn, rows, channel, C, BLOCK_R: tl.constexpr):
    """Rows of the tile that a program takes in this turn, (R,), and a mask of the tile, (R, C)."""
    tile = turn * tl.num_programs(0) + tl.program_id(0)
    row = tile.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    return row, (row < rows)[:, None] & (channel < C)[None, :]


@triton.jit
def own_tile(rows, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Rows (R,) and channels (C,) of a program that takes one tile, and a mask of the tile."""
    channel = tl.arange(0, BLOCK_C)
    row, inside = rows_of_turn(0, rows, channel, C, BLOCK_R)
    return row, channel, inside


@triton.jit
def load_channels(ptr, channel, C):
    """A parameter of the channels, (1, C), in float32; 0 beyond the last one."""
    return tl.load(ptr + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :]


@kernel("rows", "turns")
def _parts_kernel(
    x_ptr,
    out_ptr,
    rows,
    stride,
    turns,
    C,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for turn in range(turns):
        row, inside = rows_of_turn(turn, rows, channel, C, BLOCK_R)
        place = row[:, None] * stride + channel[None, :]
        total += tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    out = out_ptr + tl.program_id(0) * C + channel
    tl.store(out, tl.sum(total, axis=0), mask=channel < C)


@kernel("parts", "C")
def _total_kernel(
    parts_ptr,
    value_ptr,
    limits_ptr,
    out_ptr,
    parts,
    C,
    HAS_LIMITS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    for start in range(0, parts, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        inside = (part < parts)[:, None] & (channel < C)[None, :]
        place = part[:, None] * C + channel[None, :]
        total += tl.load(parts_ptr + place, mask=inside, other=0.0)
    sums = tl.sum(total, axis=0)
    if HAS_LIMITS:
        value = tl.load(value_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)
        size = tl.abs(sums)
        sums = tl.where(value > tl.load(limits_ptr + 1), size, sums)
        sums = tl.where(value < tl.load(limits_ptr), -size, sums)
    tl.store(out_ptr + channel, sums.to(out_ptr.dtype.element_ty), mask=channel < C)


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of the channels of x (..., C) over all other axes, (C,); float32 inside."""
    rows, channels = as_rows(x), x.size(-1)
    block_c = min(power_of_two(channels), _WIDTH)
    blocks = divide_up(channels, block_c)
    tiles = divide_up(rows.number, _ROWS)
    parts = min(tiles, max(_PARTS // blocks, 1))
    of_parts = torch.empty((parts, channels), dtype=torch.float32, device=x.device)
    _parts_kernel(
        (parts, blocks),
        rows.tensor,
        of_parts,
        rows.number,
        rows.stride,
        divide_up(tiles, parts),
        channels,
        _ROWS,
        block_c,
    )
    return sums_of_parts(of_parts, dtype)


def sums_of_parts(
    parts_PC: Tensor,
    dtype: torch.dtype,
    value_C: Tensor | None = None,
    limits: Tensor | None = None,
) -> Tensor:
    """Sums over P, (C,).

    Args:
        parts_PC: float32, contiguous.
        value_C: the parameter whose gradient the sums are, contiguous; needed with limits.
        limits: (2,) float32, lowest and highest value of its elements.
    """
    parts, channels = parts_PC.shape
    out = torch.empty((channels,), dtype=dtype, device=parts_PC.device)
    _total_kernel(
        (divide_up(channels, _SUMMED),),
        parts_PC,
        None if limits is None else value_C,
        limits,
        out,
        parts,
        channels,
        limits is not None,
        _ADDED,
        _SUMMED,
    )
    return out
