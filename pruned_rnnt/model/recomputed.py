"""Values that the backward pass computes again, so that they need no memory until then."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.model.kernels.available import train_with_kernels


def recomputed(value: Tensor, compute: Callable[[], Tensor]) -> AbstractContextManager[None]:
    """In the returned context, autograd saves `value` and views of it without keeping its memory.

    Only where fused kernels run: other devices keep the value, because computing it again would
    take them long.

    Args:
        value: contiguous or channels last, with memory of its own.
        compute: returns the same value in the same memory order. The backward pass calls it,
            outside of autocast and without gradients; until then its tensors must not change.
    """
    if not train_with_kernels(value):
        return nullcontext()
    hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(
        _Again(value, compute).pack, _unpack
    )
    return hooks


class _View(NamedTuple):
    """A view of a value that is computed again."""

    again: _Again
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int


class _Again:
    """Computes the value for the first of its views that the backward pass needs.

    The value is released with the last view.
    """

    def __init__(self, value: Tensor, compute: Callable[[], Tensor]) -> None:
        self._memory = value.untyped_storage().data_ptr()
        self._strides, self._offset = value.stride(), int(value.storage_offset())
        self._compute = compute
        self._value: Tensor | None = None
        self._packed = self._unpacked = 0

    def pack(self, x: Tensor) -> Tensor | _View:
        if x.untyped_storage().data_ptr() != self._memory:
            return x
        self._packed += 1
        return _View(self, x.shape, x.stride(), int(x.storage_offset()) - self._offset)

    def unpack(self, view: _View) -> Tensor:
        if self._value is None:
            with torch.no_grad():
                self._value = self._compute()
            assert self._value.stride() == self._strides
        value = self._value
        self._unpacked += 1
        if self._unpacked % self._packed == 0:
            self._value = None
        return value.as_strided(view.shape, view.strides, value.storage_offset() + view.offset)


def _unpack(saved: Tensor | _View) -> Tensor:
    return saved.again.unpack(saved) if isinstance(saved, _View) else saved
