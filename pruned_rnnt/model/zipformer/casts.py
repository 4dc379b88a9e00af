"""Casts under autocast in fewer kernels.

Autocast casts each weight and each bias by a kernel of its own, and backward each of their
gradients: a thousand launches a step, which take the host longer than their work takes a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


class JointCast:
    """Lends modules their parameters in the dtype of autocast.

    Args:
        modules: whose own parameters are meant, all of one dtype.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        slots = [
            (parameter.dim() == 1, module, name)
            for module in modules
            for name, parameter in module.named_parameters(recurse=False)
        ]
        # Vectors last: sizes of matrices are multiples of what their products are aligned to.
        slots.sort(key=lambda slot: slot[0])
        self._slots = [(module, name) for _, module, name in slots]

    @contextmanager
    def lent(self, device: str) -> Iterator[None]:
        """Inside, where autocast is on and gradients are wanted, the modules have the casts."""
        wanted = torch.is_grad_enabled() and torch.is_autocast_enabled(device)
        if not (self._slots and wanted):
            yield
            return
        own = [module._parameters[name] for module, name in self._slots]
        casts = _JointCast.apply(  # type: ignore[no-untyped-call]
            torch.get_autocast_dtype(device), *own
        )
        self._set(casts)
        try:
            yield
        finally:
            self._set(own)

    def _set(self, parameters: Iterable[Any]) -> None:
        for (module, name), parameter in zip(self._slots, parameters, strict=True):
            module._parameters[name] = parameter


class _JointCast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = parameters[0].dtype
        return _cast(parameters, dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_cast(grads, ctx.dtype)


def _cast(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    vector = _flatten_dense_tensors(tensors).to(dtype)
    pieces: tuple[Tensor, ...] = _unflatten_dense_tensors(vector, tensors)
    return pieces
