"""Tensors as rows of channels, and the tiles of rows that a program takes."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import divide_up, power_of_two

# Programs that share the sums over rows.
_PARTS = 528


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
    expected = 0
    for axis in range(x.dim() - 2, -1, -1):
        if x.size(axis) == 1:
            continue
        if expected and x.stride(axis) != expected:
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
