"""Rotary positions: queries, keys and values out of one tensor, with queries and keys rotated.

    a' = a * cosine[t, i] - b * sine[t, i]
    b' = b * cosine[t, i] + a * sine[t, i]          (a, b) = channels i and i + K / 2 of a head

The gradient is rotated back: the same with -sine. Axes: N sequences, T frames, H heads, K channels
of a head; a row is one frame of one sequence. A program takes a tile of rows, with all pairs:

    packed (N, T, 3, H, K)   | q h0 | q h1 | ... | k h0 | k h1 | ... | v h0 | v h1 | ...
                               a  b   a  b         a  b
    three (N, T, H, K)       | q h0 | q h1 | ...   | k h0 | k h1 | ...   | v h0 | v h1 | ...

torch takes four kernels, five for the gradient, and copies to pack the three gradients again.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import kernel
from pruned_rnnt.model.kernels.rows import own_tile, row_tiles

_TILE = 1024


class Heads(NamedTuple):
    """Queries, keys and values or their gradients, (N, T, H, K) each."""

    query: Tensor
    key: Tensor
    value: Tensor


@triton.jit
def _rotate_pairs(from_ptr, to_ptr, source, target, half, cosine, sine, inside):
    a = tl.load(from_ptr + source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(from_ptr + source + half, mask=inside, other=0.0).to(tl.float32)
    dtype = to_ptr.dtype.element_ty
    tl.store(to_ptr + target, (a * cosine - b * sine).to(dtype), mask=inside)
    tl.store(to_ptr + target + half, (b * cosine + a * sine).to(dtype), mask=inside)


@triton.jit
def _copy_pairs(from_ptr, to_ptr, source, target, half, inside):
    tl.store(to_ptr + target, tl.load(from_ptr + source, mask=inside), mask=inside)
    tl.store(to_ptr + target + half, tl.load(from_ptr + source + half, mask=inside), mask=inside)


@kernel("rows", "frames")
def _rotary_kernel(
    packed_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    cosine_ptr,
    sine_ptr,
    rows,
    frames,
    pairs,
    HALF: tl.constexpr,
    IS_BACKWARD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    row, pair, inside = own_tile(rows, pairs, BLOCK_R, BLOCK_P)
    within = (pair % HALF)[None, :]
    angle = (row % frames)[:, None] * (2 * HALF) + within
    cosine = tl.load(cosine_ptr + angle, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sine_ptr + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    width = 2 * pairs
    channel = (pair // HALF)[None, :] * (2 * HALF) + within
    packed = row[:, None] * (3 * width) + channel
    own = row[:, None] * width + channel
    if IS_BACKWARD:
        _rotate_pairs(query_ptr, packed_ptr, own, packed, HALF, cosine, -sine, inside)
        _rotate_pairs(key_ptr, packed_ptr + width, own, packed, HALF, cosine, -sine, inside)
        _copy_pairs(value_ptr, packed_ptr + 2 * width, own, packed, HALF, inside)
    else:
        _rotate_pairs(packed_ptr, query_ptr, packed, own, HALF, cosine, sine, inside)
        _rotate_pairs(packed_ptr + width, key_ptr, packed, own, HALF, cosine, sine, inside)
        _copy_pairs(packed_ptr + 2 * width, value_ptr, packed, own, HALF, inside)


def rotate_heads(packed_NT3HK: Tensor, angles: tuple[Tensor, Tensor]) -> Heads:
    """Unpack a contiguous tensor; `angles` are the factors of `rotate`, for T frames."""
    batch, frames, _, heads, width = packed_NT3HK.shape
    found = Heads(*(packed_NT3HK.new_empty((batch, frames, heads, width)) for _ in range(3)))
    _launch(packed_NT3HK, found, angles, is_backward=False)
    return found


def rotate_heads_backward(gradients: Heads, angles: tuple[Tensor, Tensor]) -> Tensor:
    """The gradient of the packed tensor from contiguous ones, (N, T, 3, H, K)."""
    batch, frames, heads, width = gradients.query.shape
    packed = gradients.query.new_empty((batch, frames, 3, heads, width))
    _launch(packed, gradients, angles, is_backward=True)
    return packed


def _launch(
    packed_NT3HK: Tensor, three: Heads, angles: tuple[Tensor, Tensor], *, is_backward: bool
) -> None:
    batch, frames, heads, width = three.query.shape
    rows, pairs = batch * frames, heads * width // 2
    tiles = row_tiles(rows, pairs, _TILE)
    # Of both factors, the first holds cosines, the second half of the other one sines.
    _rotary_kernel(
        (tiles.number,),
        packed_NT3HK,
        *three,
        *angles,
        rows,
        frames,
        pairs,
        width // 2,
        is_backward,
        tiles.rows,
        tiles.channels,
    )
