"""What autograd functions share: torch.compile, and backward passes that refuse to be
differentiated."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

_AnyFunction = TypeVar("_AnyFunction", bound=Callable[..., Any])

MESSAGE = (
    "pruned_rnnt's losses have first derivatives only: this gradient cannot be differentiated again"
)


def opaque_to_compile(function: _AnyFunction) -> _AnyFunction:
    """Keeps calls of `function` as single nodes of torch.compile's graph, for AOTAutograd to trace:
    Dynamo of torch 2.11 fails on autograd functions with optional tensor arguments or symbolic
    sizes."""
    return cast(_AnyFunction, torch.compiler.allow_in_graph(function))


class _Refuse(torch.autograd.Function):
    """The gradients, whose own backward pass raises."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(MESSAGE)


def refuses_second_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the backward of an autograd.Function that writes into fresh tensors by raw ops.

    torch's once_differentiable treats the gradient as a constant under create_graph=True if the
    incoming gradient is a constant, so that a gradient penalty would silently be wrong.
    """

    @wraps(backward)
    def refusing(ctx: Any, *grad_outputs: Tensor) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, *grad_outputs)
        with torch.no_grad():
            grads = backward(ctx, *grad_outputs)
        each = grads if isinstance(grads, tuple) else (grads,)
        anchor = torch.zeros((), requires_grad=True)
        refused = iter(_Refuse.apply(anchor, *[grad for grad in each if grad is not None]))  # type: ignore[no-untyped-call]
        return tuple(None if grad is None else next(refused) for grad in each)

    return refusing
