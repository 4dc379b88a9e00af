"""Weights in the dtype of autocast, those of a whole layer at once.

Autocast converts every weight and bias by itself, and every gradient back: two launches for each
parameter, which for encoders of many small layers take the host longer than the products take the
GPU. Here a layer's are converted by one launch, and so are their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.model.depthwise import compute_dtype
from pruned_rnnt.model.joined_frames import pays

# What autocast computes in the lower precision.
_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d)


class CastWeights:
    """Weights and biases of the linear and convolution layers inside a module."""

    def __init__(self, module: nn.Module) -> None:
        self._places: list[tuple[dict[str, Any], str]] = [
            (inner._parameters, name)
            for inner in module.modules()
            if isinstance(inner, _PRODUCTS)
            for name, value in inner._parameters.items()
            if value is not None
        ]

    def converted(self, x: Tensor) -> AbstractContextManager[None]:
        """Inside, the module computes with converted weights, where that is worth it for input x.

        Gradients reach the parameters themselves.
        """
        if not pays(x):
            return nullcontext()
        weights: list[Tensor] = [parameters[name] for parameters, name in self._places]
        dtype = compute_dtype(x, weights[0])
        return nullcontext() if dtype == weights[0].dtype else self._exchanged(weights, dtype)

    @contextmanager
    def _exchanged(self, weights: list[Tensor], dtype: torch.dtype) -> Iterator[None]:
        converted = _Together.apply(dtype, *weights)  # type: ignore[no-untyped-call]
        try:
            for (parameters, name), value in zip(self._places, converted, strict=True):
                parameters[name] = value
            yield
        finally:
            for (parameters, name), weight in zip(self._places, weights, strict=True):
                parameters[name] = weight


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = weights[0].dtype
        return tuple(_copies(weights, dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        copies = iter(_copies([grad for grad in grads if grad is not None], ctx.dtype))
        return None, *(None if grad is None else next(copies) for grad in grads)


def _copies(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, list(tensors))
    return copies
