"""Cast the parameters of a layer to the dtype of autocast in one kernel.

Autocast casts each parameter, and each gradient back, by a kernel of its own. In an encoder of many
small layers, these are a thousand launches a step, which take the CPU longer than the matrix
products take the GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.model.depthwise import compute_dtype
from pruned_rnnt.model.joined_frames import should_avoid_cudnn_replanning
from pruned_rnnt.model.own_function import applied
from pruned_rnnt.model.side_branch import join_side_branch

# Another thread with the same layer must not take casts for the parameters. Not an attribute of
# layers, which are copied and pickled.
_lock = threading.RLock()


class CastParameters:
    """Casts the parameters of some modules, each used once, for the duration of a forward pass.

    Args:
        modules: modules whose own parameters autocast would cast, all of one dtype.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._slots: list[tuple[dict[str, Any], str]] = [
            (module._parameters, name)
            for module in modules
            for name, value in module._parameters.items()
            if value is not None
        ]

    def cast(self, x: Tensor) -> AbstractContextManager[None]:
        """In this context the modules have parameters in the dtype that autocast uses for x.

        Gradients reach the original parameters. Without autocast, on a CPU and under a compiler,
        the context does nothing. Other threads wait for its end, whatever their layer. A parameter
        that was replaced by a parametrization is left to autocast.
        """
        return self._replace(x) if should_avoid_cudnn_replanning(x) else nullcontext()

    @contextmanager
    def _replace(self, x: Tensor) -> Iterator[None]:
        with _lock:
            slots = [(place, name) for place, name in self._slots if place.get(name) is not None]
            originals: list[Tensor] = [place[name] for place, name in slots]
            dtype = compute_dtype(x, originals[0]) if originals else None
            if not originals or dtype == originals[0].dtype:
                yield
                return
            casts = applied(_Cast, dtype, *originals)
            try:
                _set(slots, casts)
                yield
            finally:
                _set(slots, originals)


def _set(slots: Iterable[tuple[dict[str, Any], str]], values: Iterable[Tensor]) -> None:
    for (parameters, name), value in zip(slots, values, strict=True):
        parameters[name] = value


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = parameters[0].dtype
        copies = _copies(parameters, dtype)
        # Layers need not compute the gradients of frozen parameters.
        frozen = [copy for copy, p in zip(copies, parameters, strict=True) if not p.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(copies)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        join_side_branch()
        copies = iter(_copies([grad for grad in grads if grad is not None], ctx.dtype))
        return None, *(None if grad is None else next(copies) for grad in grads)


def is_cast(parameter: Tensor) -> bool:
    """Whether this is a copy by `CastParameters`, whose gradient nothing else uses."""
    return isinstance(parameter.grad_fn, _Cast._backward_cls)


def _copies(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, list(tensors))
    return copies
