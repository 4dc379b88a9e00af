"""Tensors as rows of channels, which kernels read with one stride."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
