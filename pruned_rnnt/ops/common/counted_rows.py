"""Products of float32 matrices whose number of rows only the device knows.

cuBLAS takes no such number in float32. These products run on tensor cores, with three products of
TF32 parts; their errors are those of float32 products.

The rows that exist are the first ones of a matrix: as many as `total` has from row `begin` on. The
others are neither read nor written, and cost next to nothing.

Axes: R rows, m and n columns, k elements of a sum, G blocks of the rows.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from pruned_rnnt.ops.common.column_sums import column_sums
from pruned_rnnt.ops.common.library import Out, op
from pruned_rnnt.ops.common.native import has_native_kernel

# A thread block computes a tile of so many rows and columns of a result; a multiprocessor has two
# thread blocks (csrc/cuda/whole_lattice/counted_rows.cu).
_TILE = (128, 64)
_TILES_AT_ONCE = 2
_MOST_BLOCKS = 16


def can_count_rows(x: Tensor) -> bool:
    """True if the products below take x's dtype and device without waiting for the device, and are
    not slower than cuBLAS's: not where torch's settings allow TF32."""
    return (
        x.is_cuda
        and x.dtype == torch.float32
        # Not allow_tf32, which refuses settings made through this one.
        and torch.backends.cuda.matmul.fp32_precision != "tf32"
        and has_native_kernel("counted_rows_product", "cuda")
        and _has_fast_tensor_cores(x.device)
    )


@cache
def _has_fast_tensor_cores(device: torch.device) -> bool:
    """That compute three products of TF32 parts sooner than other cores one in float32. Those of
    8.6, 8.9 and 12.0 are about as fast as the other cores."""
    return torch.cuda.get_device_capability(device) in ((8, 0), (9, 0))


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _count(total: Tensor, begin: int, most: int) -> int:
    return min(max(int(total) - begin, 0), most)


@op
def counted_rows_product(
    a: Tensor, b: Tensor, bias: Tensor | None, total: Tensor, begin: int, out: Out[Tensor]
) -> None:
    """a (R,k) of contiguous rows, b (k,n) of contiguous rows or columns, bias (n) -> the rows of
    out (R,n) that exist: a b + bias. total: one int64. The kernel takes float32."""
    count = _count(total, begin, a.shape[0])
    torch.mm(a[:count], b, out=out[:count])
    if bias is not None:
        out[:count] += bias


@op
def counted_rows_sums(
    a: Tensor, b: Tensor, total: Tensor, begin: int, add: bool, out: Out[Tensor]
) -> None:
    """a (R,m), b (R,n), both of contiguous rows -> out (G,m,n), of which each matrix is the product
    of a, transposed, and b over one of G even blocks of the rows that exist, added to what it has
    if `add`. Otherwise as counted_rows_product."""
    count = _count(total, begin, a.shape[0])
    each = _rounded_up(_rounded_up(count, out.shape[0]) // out.shape[0], 8)
    for block, sums in enumerate(out):
        rows = slice(min(count, block * each), min(count, (block + 1) * each))
        torch.addmm(sums, a[rows].t(), b[rows], beta=int(add), out=sums)


def counted_rows_weight_sums(
    a: Tensor, b: Tensor, total: Tensor, begin: int, out: Tensor, *, add: bool, room: Tensor
) -> None:
    """out (m,n) = the product of a (R,m), transposed, and b (R,n) over the rows that exist, or +=,
    in an order that is fixed for their number. room: a contiguous workspace of out's dtype for the
    sums over blocks of rows; a small one may cost time."""
    tiles = math.prod(-(-size // tile) for size, tile in zip(out.shape, _TILE, strict=True))
    at_once = _TILES_AT_ONCE * _multiprocessors(a.device)
    blocks = row_blocks(tiles, at_once, room.numel() // out.numel())
    if blocks == 1:
        counted_rows_sums(a, b, total, begin, add, out.unsqueeze(0))
        return
    sums = room.view(-1)[: blocks * out.numel()].view(blocks, *out.shape)
    counted_rows_sums(a, b, total, begin, False, sums)
    column_sums(sums.flatten(1), out.view(-1), add=add)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def row_blocks(tiles: int, at_once: int, most: int) -> int:
    """The number of blocks of rows, at most `most` if that is above one, with which thread blocks
    of one tile and one block of rows each leave the least of the device idle, which runs so many at
    once; the smaller of two that are about as good."""

    def busy(blocks: int) -> float:
        rounds = -(-tiles * blocks // at_once)
        return tiles * blocks / (rounds * at_once)

    candidates = range(1, max(1, min(most, _MOST_BLOCKS)) + 1)
    best = max(map(busy, candidates))
    return next(blocks for blocks in candidates if busy(blocks) >= 0.95 * best)
