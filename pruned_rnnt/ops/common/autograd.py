"""Autograd functions around raw ops: they refuse second derivatives, scale stored gradients by the
chain rule, and are single nodes for torch.compile, without an import of Dynamo."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import define

_AnyFunction = TypeVar("_AnyFunction", bound=Callable[..., Any])

_REFUSAL = (
    "pruned_rnnt's losses have first derivatives only: this gradient cannot be differentiated again"
)

# torch's message for an op that takes no batch of incoming gradients.
_NO_RULE = "Batching rule not implemented"
_NO_BATCH = (
    "pruned_rnnt's losses take no batch of incoming gradients (is_grads_batched, vectorize, "
    "torch.func.vmap): call torch.autograd.grad for each of them"
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
        if torch.compiler.is_compiling():
            return backward(ctx, *grad_outputs)
        try:
            with torch.no_grad():
                grads = backward(ctx, *grad_outputs)
        except RuntimeError as error:
            if _NO_RULE in str(error):
                raise RuntimeError(_NO_BATCH) from error
            raise
        if not torch.is_grad_enabled():
            return grads
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


def _scale(sources: Sequence[Tensor] | None, factors: Tensor, results: Sequence[Tensor]) -> None:
    for source, result in zip(results if sources is None else sources, results, strict=True):
        wide = factors.view(-1, *[1] * (source.dim() - 1)) if factors.dim() else factors
        result.copy_(source * wide)


# sources of any shapes and floating dtypes, contiguous; factors acc, () or (N) for sources (N,...)
# -> results, like the sources: source times factors, each rounded once. If sources is None, results
# are multiplied in place.
scale = define("scale(Tensor[]? sources, Tensor factors, Tensor(a!)[] results) -> ()", _scale)

_DYNAMO = "torch._dynamo"
_FUNCTIONS: list[Callable[..., Any]] = []


def opaque_to_compile(function: _AnyFunction) -> _AnyFunction:
    """Keeps calls of `function` as single nodes of torch.compile's graph, for AOTAutograd to trace:
    Dynamo of torch 2.11 fails on autograd functions with optional tensor arguments or symbolic
    sizes.

    The decorator of torch imports Dynamo, which takes as long as torch itself. Here Dynamo learns
    of the functions when something else imports it.
    """
    if _DYNAMO in sys.modules:
        sys.modules[_DYNAMO].allow_in_graph(function)
    else:
        _FUNCTIONS.append(function)
    return function


class _ImportOfDynamo(MetaPathFinder):
    """Passes the functions to Dynamo at the end of its import."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != _DYNAMO:
            return None
        others = (x.find_spec(fullname, path, target) for x in sys.meta_path if x is not self)
        spec = next(filter(None, others), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_pass(dynamo: ModuleType) -> None:
            execute(dynamo)
            # Only now: others may look for the spec without importing the module.
            sys.meta_path.remove(self)
            for function in _FUNCTIONS:
                dynamo.allow_in_graph(function)

        spec.loader.exec_module = execute_and_pass  # type: ignore[assignment]
        return spec


if _DYNAMO not in sys.modules:
    sys.meta_path.insert(0, _ImportOfDynamo())
