"""Backward passes that refuse to be differentiated."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

_REFUSAL = (
    "pruned_rnnt's losses have first derivatives only: this gradient cannot be differentiated again"
)


class _Refuse(torch.autograd.Function):
    """The gradients, whose own backward pass raises. They depend on the first tensors."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.view_as(grad) for grad in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(_REFUSAL)


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
        sources = [*_sources(ctx), *(x for x in grad_outputs if x is not None)]
        # So that a backward pass for all leaves arrives here, whatever the sources are.
        sources.append(torch.zeros((), device="cpu", requires_grad=True))
        given = [grad for grad in grads if grad is not None]
        refused = iter(_Refuse.apply(len(sources), *sources, *given))  # type: ignore[no-untyped-call]
        return tuple(None if grad is None else next(refused) for grad in grads)

    return refusing


def _sources(ctx: Any) -> list[Tensor]:
    """The inputs that the gradients depend on: torch.autograd.grad looks for what it is asked for
    behind these alone, and would leave out a refusal that it does not find there."""
    saved = [(x.grad_fn, x) for x in ctx.saved_tensors if x is not None and x.requires_grad]
    found = []
    for node, _ in ctx.next_functions:
        if node is None:
            continue
        leaf = getattr(node, "variable", None)
        source = next((x for origin, x in saved if origin is node), leaf)
        if source is None:
            # The input itself is gone, and with it the place where a refusal would be found.
            raise RuntimeError(_REFUSAL)
        found.append(source)
    return found


def with_occupancies(ctx: Any, loss: Tensor, *occupancies: Tensor) -> tuple[Tensor, ...]:
    """The results of a forward pass of which only the loss is differentiable."""
    ctx.mark_non_differentiable(*occupancies)
    # Otherwise autograd allocates gradients of zeros as large as these.
    ctx.set_materialize_grads(False)
    return loss, *occupancies
