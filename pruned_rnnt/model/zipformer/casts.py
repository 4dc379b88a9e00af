"""Casts of many parameters under autocast in few kernels.

Autocast casts each weight and bias with its own kernel, and so does backward with the gradients.
These are a thousand launches a step, which take the host longer than the casts take a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


class JointCast:
    """Casts all parameters of some modules together to the dtype of autocast.

    Args:
        modules: their direct parameters are cast; these all have one dtype.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        slots = [
            (parameter.dim() == 1, module, name)
            for module in modules
            for name, parameter in module.named_parameters(recurse=False)
        ]
        # Vectors come last, because their sizes could break the alignment that matmuls need.
        slots.sort(key=lambda slot: slot[0])
        self._slots = [(module, name) for _, module, name in slots]

    @contextmanager
    def cast(self, device: str) -> Iterator[None]:
        """Replaces the parameters by their casts inside the context.

        Does nothing if autocast or gradients are off.
        """
        enabled = torch.is_grad_enabled() and torch.is_autocast_enabled(device)
        if not (self._slots and enabled):
            yield
            return
        originals = [module._parameters[name] for module, name in self._slots]
        casts = _JointCast.apply(  # type: ignore[no-untyped-call]
            torch.get_autocast_dtype(device), *originals
        )
        self._set(casts)
        try:
            yield
        finally:
            self._set(originals)

    def _set(self, parameters: Iterable[Any]) -> None:
        for (module, name), parameter in zip(self._slots, parameters, strict=True):
            module._parameters[name] = parameter


class _JointCast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = parameters[0].dtype
        return _cast_all(parameters, dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_cast_all(grads, ctx.dtype)


def _cast_all(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Views of one vector that holds all tensors in `dtype`."""
    vector = _flatten_dense_tensors(tensors).to(dtype)
    pieces: tuple[Tensor, ...] = _unflatten_dense_tensors(vector, tensors)
    return pieces
