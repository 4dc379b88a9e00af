"""Sums over the rows of a matrix, as the gradient of a bias needs them.

Axes: R rows, C columns, P parts of the rows.
"""

from __future__ import annotations

from torch import Tensor

from pruned_rnnt.ops.common.library import Out, accumulator, op

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
