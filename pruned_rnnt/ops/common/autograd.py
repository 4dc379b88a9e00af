"""Backward passes that refuse to be differentiated."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


class _Refuse(torch.autograd.Function):
    """The gradients, whose own backward pass raises."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(
            "pruned_rnnt's losses have first derivatives only: this gradient cannot be "
            "differentiated again"
        )


def refuses_second_derivative(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    """Decorates the backward of an autograd.Function that writes into fresh tensors by raw ops.

    It is not called where all incoming gradients are None (`set_materialize_grads`).

    torch's once_differentiable treats the gradient as a constant under create_graph=True if the
    incoming gradient is a constant, so that a gradient penalty would silently be wrong.
    """

    @wraps(backward)
    def refusing(ctx: Any, *grad_outputs: Tensor | None) -> Any:
        if all(grad is None for grad in grad_outputs):
            return (None,) * len(ctx.needs_input_grad)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, *grad_outputs)
        with torch.no_grad():
            grads = backward(ctx, *grad_outputs)
        anchor = torch.zeros((), requires_grad=True)
        refused = iter(_Refuse.apply(anchor, *[grad for grad in grads if grad is not None]))  # type: ignore[no-untyped-call]
        return tuple(None if grad is None else next(refused) for grad in grads)

    return refusing


def with_occupancies(ctx: Any, loss: Tensor, *occupancies: Tensor) -> tuple[Tensor, ...]:
    """The results of a forward pass of which only the loss is differentiable."""
    ctx.mark_non_differentiable(*occupancies)
    # Otherwise autograd allocates gradients of zeros as large as these.
    ctx.set_materialize_grads(False)
    return loss, *occupancies
