"""Matrix products, and sums over the rows of a matrix, that torch does not have as such: in a dtype
that the caller chooses, in a fixed order, or of rows whose number only the device knows.

Autocast does not change torch's products with `out`. On CUDA the product of 16-bit factors can be
summed and written in float32, without rounding to 16 bits.

Where only the device knows the number of rows, the rows that exist are the first ones of a matrix;
the others cost next to nothing. In bfloat16 torch has such products. cuBLAS takes no such number in
float32: those products run on tensor cores, with three products of TF32 parts, whose errors are
those of float32 products. There, as many rows exist as `total` has from row `begin` on, and the
others are neither read nor written.

Axes: R rows, C columns, P parts of the rows; of products m and n columns, k elements of a sum,
G blocks of the rows.
"""

from __future__ import annotations

import math
from functools import cache, reduce

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import Out, accumulator, op
from pruned_rnnt.ops.common.native import has_native_kernel

# P depends on the shape of the matrix alone, so that sums are the same on all devices of a kind.
# Narrow matrices have enough parts to fill a GPU.
_LEAST_ROWS = 32
_MOST_PARTS = 512
_COLUMNS_OF_A_BLOCK = 1024


def parts_of(rows: int, columns: int) -> int:
    """P for a matrix (R,C)."""
    most = max(1, _MOST_PARTS * _COLUMNS_OF_A_BLOCK // max(columns, _COLUMNS_OF_A_BLOCK))
    return min(max(1, rows // _LEAST_ROWS), most)


@op
def _column_sums(x: Tensor, add: bool, partial: Out[Tensor], sums: Out[Tensor]) -> None:
    """x (R,C), of column stride 1 -> sums (C) acc, added to if `add`. partial (P,C) acc is
    workspace: a kernel sums P equal parts of the rows into it, and then its rows."""
    total = x.sum(0, dtype=sums.dtype)
    if add:
        sums.add_(total)
    else:
        sums.copy_(total)


def column_sums(x_RC: Tensor, sums_C: Tensor, *, add: bool) -> None:
    """Writes the sums over the rows of x (R,C) into sums (C) acc, or adds them to it.

    x has a column stride of 1 and any row stride. The order of the sum is fixed.
    """
    shape = (parts_of(*x_RC.shape), x_RC.shape[1])
    _column_sums(x_RC, add, x_RC.new_empty(shape, dtype=accumulator(x_RC.dtype)), sums_C)


def multiply_into(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> Tensor:
    """out = a b, or with `add` out += a b; all 2-D, or all 3-D batches. Returns out.

    out has the dtype of a and b, or float32 (on the CPU also float64) for narrower ones.
    """
    batched = a.dim() == 3
    if a.dtype == out.dtype:
        if add:
            return (torch.baddbmm if batched else torch.addmm)(out, a, b, out=out)
        return (torch.bmm if batched else torch.mm)(a, b, out=out)
    if a.is_cuda:
        aten = torch.ops.aten
        if add:
            product = aten.baddbmm.dtype_out if batched else aten.addmm.dtype_out
            result: Tensor = product(out, a, b, out.dtype, out=out)
        else:
            product = aten.bmm.dtype_out if batched else aten.mm.dtype_out
            result = product(a, b, out.dtype, out=out)
        return result
    # The CPU has no product of mixed dtypes.
    return multiply_into(out, a.to(out.dtype), b.to(out.dtype), add=add)


def is_autocast_enabled(x: Tensor) -> bool:
    """Whether autocast is on for the device of x, which may be meta."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def product_dtype(*factors: Tensor) -> torch.dtype:
    """The dtype of products of these: autocast's, or the widest of theirs."""
    if is_autocast_enabled(factors[0]) and factors[0].dtype != torch.float64:
        return torch.get_autocast_dtype(factors[0].device.type)
    return reduce(torch.promote_types, [x.dtype for x in factors])


def can_multiply_first_rows(x: Tensor) -> bool:
    """True if multiply_first_rows takes factors of x's dtype on its device without waiting: where
    torch has grouped products whose sizes are on the device (bfloat16, from compute capability 9
    on)."""
    return x.is_cuda and x.dtype == torch.bfloat16 and _has_grouped_products(x.device)


@cache
def _has_grouped_products(device: torch.device) -> bool:
    has_function = hasattr(torch.nn.functional, "grouped_mm")
    return has_function and torch.cuda.get_device_capability(device)[0] >= 9


def multiply_first_rows(a: Tensor, b: Tensor, count: Tensor) -> Tensor:
    """(R,n) = a (R,m) times b (m,n) for the first `count` (1,) int32 rows, a number that only the
    device knows; the other rows are undefined."""
    if a.is_cuda:
        return torch.nn.functional.grouped_mm(a, b[None], offs=count)
    out = a.new_empty((a.shape[0], b.shape[1]))
    multiply_into(out[: int(count)], a[: int(count)], b)
    return out


def row_block_products(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """(G,m,n): the product of a (R,m), transposed, and b (R,n) over each block of rows. ends (G,)
    int32: the row behind each block, of which the first begins at row 0."""
    if a.is_cuda:
        return torch.nn.functional.grouped_mm(a.t(), b, offs=ends)
    blocks = zip([0, *ends.tolist()[:-1]], ends.tolist(), strict=True)
    return torch.stack([a[begin:end].t() @ b[begin:end] for begin, end in blocks])


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
