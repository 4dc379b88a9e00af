"""Between rows, in which the heads of a frame lie side by side, and matrices of each head.

    rows  (N, T, H * K)   | h0 h1 h2 | h0 h1 h2 | ...            one frame after another
    heads (N, H, T, K)    | h0 h0 ...| h1 h1 ...| h2 h2 ...      one head after another

Axes: N sequences, T frames, H heads, K channels of a head. A program takes a tile of rows with all
of their channels. Batches of matrix products need the second order; torch copies to it several
times as slowly, and once for each product.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import kernel
from pruned_rnnt.model.kernels.rows import as_rows, own_tile, row_tiles

_TILE = 1024


@kernel("rows", "frames")
def _heads_kernel(
    rows_ptr,
    heads_ptr,
    rows,
    frames,
    row_stride,
    channels,
    K,
    TO_HEADS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row, channel, inside = own_tile(rows, channels, BLOCK_R, BLOCK_C)
    sequence = row // frames
    # Row h * T of the matrices of a sequence is the first one of head h.
    first = sequence * (channels // K) * frames + row - sequence * frames
    head = channel // K
    in_rows = rows_ptr + row[:, None] * row_stride + channel[None, :]
    in_heads = heads_ptr + (first[:, None] + head[None, :] * frames) * K
    in_heads += (channel - head * K)[None, :]
    if TO_HEADS:
        tl.store(in_heads, tl.load(in_rows, mask=inside, other=0.0), mask=inside)
    else:
        tl.store(in_rows, tl.load(in_heads, mask=inside, other=0.0), mask=inside)


def to_heads(x_NTC: Tensor, heads: int) -> Tensor:
    """(N, T, H * K) -> (N, H, T, K), contiguous; the rows of x have one stride."""
    batch, frames, channels = x_NTC.shape
    out = x_NTC.new_empty((batch, heads, frames, channels // heads))
    rows = as_rows(x_NTC)
    _launch(rows.tensor, out, rows.stride, to_heads=True)
    return out


def from_heads(x_NHTK: Tensor) -> Tensor:
    """(N, H, T, K), contiguous -> (N, T, H * K), contiguous."""
    batch, heads, frames, width = x_NHTK.shape
    out = x_NHTK.new_empty((batch, frames, heads * width))
    _launch(out, x_NHTK, out.size(-1), to_heads=False)
    return out


def _launch(x_NTC: Tensor, x_NHTK: Tensor, row_stride: int, *, to_heads: bool) -> None:
    batch, heads, frames, width = x_NHTK.shape
    rows, channels = batch * frames, heads * width
    tiles = row_tiles(rows, channels, _TILE)
    _heads_kernel(
        (tiles.number,),
        x_NTC,
        x_NHTK,
        rows,
        frames,
        row_stride,
        channels,
        width,
        to_heads,
        tiles.rows,
        tiles.channels,
    )
