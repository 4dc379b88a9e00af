"""Sums over the rows of a matrix, as the gradient of a bias needs them.

Axes: R rows, C columns, P parts of the rows. acc: float64 for float64 input, else float32.
"""

from __future__ import annotations

from torch import Tensor

from pruned_rnnt.ops.common.library import accumulator, define

# The P of a matrix follows from its shape alone, so that sums are the same on every device of a
# kind: parts of some ten rows at least, and of narrow matrices enough parts to fill a GPU.
_LEAST_ROWS = 32
_MOST_PARTS = 512
_COLUMNS_OF_A_BLOCK = 1024


def _column_sums(x: Tensor, add: bool, partial: Tensor, sums: Tensor) -> None:
    total = x.sum(0, dtype=sums.dtype)
    if add:
        sums.add_(total)
    else:
        sums.copy_(total)


def parts_of(rows: int, columns: int) -> int:
    """P for a matrix (R,C)."""
    most = max(1, _MOST_PARTS * _COLUMNS_OF_A_BLOCK // max(columns, _COLUMNS_OF_A_BLOCK))
    return min(max(1, rows // _LEAST_ROWS), most)


def column_sums(x_RC: Tensor, sums_C: Tensor, *, add: bool) -> None:
    """Writes the sums over the rows of x (R,C) into sums (C) acc, or adds them to it.

    x has neighbouring columns side by side; rows may lie further apart than they are long. The
    order of the sum is fixed.
    """
    partial_PC = x_RC.new_empty(
        (parts_of(*x_RC.shape), x_RC.shape[1]), dtype=accumulator(x_RC.dtype)
    )
    column_sums_op(x_RC, add, partial_PC, sums_C)


# x (R,C), of column stride 1 -> sums (C) acc, added to if `add`. partial (P,C) acc is workspace: a
# kernel sums P equal parts of the rows into it, and then its rows; what it holds afterwards means
# nothing.
column_sums_op = define(
    "column_sums(Tensor x, bool add, Tensor(a!) partial, Tensor(b!) sums) -> ()", _column_sums
)
