"""The residual stream of a layer, and its copies in the dtype of autocast.

The stream has the dtype of the parameters; under autocast, modules read a copy in its lower
precision. One autograd function makes both, with half the kernels of separate casts and sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pruned_rnnt.model.kernels.available import use_kernels, use_own_function


def begin_stream(x_NTE: Tensor, readers: int = 1) -> tuple[Tensor, ...]:
    """x, and a copy of x for each of `readers` modules."""
    dtype = _readers_dtype(x_NTE)
    if dtype is None:
        return (x_NTE,) * (1 + readers)
    several: tuple[Tensor, ...] = _Begin.apply(  # type: ignore[no-untyped-call]
        x_NTE, dtype, readers
    )
    return several


def add_branch(
    x_NTE: Tensor, branch_NTE: Tensor, keep_N11: Tensor | None = None, *, read: bool = True
) -> tuple[Tensor, Tensor]:
    """x + branch * keep in the dtype of x, and, if `read`, the copy for the next module."""
    dtype = _readers_dtype(x_NTE) if read else None
    if dtype is None and keep_N11 is None and not use_kernels(x_NTE, branch_NTE):
        total_NTE = x_NTE + branch_NTE
        return total_NTE, total_NTE
    both: tuple[Tensor, Tensor] = _Add.apply(  # type: ignore[no-untyped-call]
        x_NTE, branch_NTE, keep_N11, dtype
    )
    return both if dtype is not None else (both[0], both[0])


def _readers_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of autocast, or None if modules read x itself.

    They do without autocast, and in inference without fused kernels.
    """
    device = x.device.type
    if not (torch.is_autocast_enabled(device) and use_own_function(x)):
        return None
    return torch.get_autocast_dtype(device)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, readers: int) -> tuple[Tensor, ...]:
        ctx.fused = use_kernels(x)
        low = x.to(dtype)
        return x.view_as(x), *(low.view_as(low) for _ in range(readers))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *grads: Tensor) -> tuple[Tensor, None, None]:
        if ctx.fused and len(grads) <= 2:
            from pruned_rnnt.model.kernels.stream import begin_backward

            second = grads[1].contiguous() if len(grads) == 2 else None
            return begin_backward(grad.contiguous(), grads[0].contiguous(), second), None, None
        total = grad + grads[0]
        for more in grads[1:]:
            total = total.add_(more)
        return total, None, None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, keep: Tensor | None, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(keep)
        ctx.dtype, ctx.fused = branch.dtype, use_kernels(x, branch)
        if ctx.fused:
            from pruned_rnnt.model.kernels.stream import add

            return add(x.contiguous(), branch.contiguous(), keep, dtype)
        total = x + branch if keep is None else torch.addcmul(x, branch, keep)
        return total, None if dtype is None else total.to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad: Tensor, of_reader: Tensor | None
    ) -> tuple[Tensor, Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        if ctx.fused:
            from pruned_rnnt.model.kernels.stream import add_backward

            if of_reader is not None:
                of_reader = of_reader.contiguous()
            return *add_backward(grad.contiguous(), of_reader, keep, ctx.dtype), None, None
        if of_reader is not None:
            grad = grad + of_reader
        if keep is None:
            return grad, grad.to(ctx.dtype), None, None
        of_branch = torch.empty_like(grad, dtype=ctx.dtype)
        return grad, torch.mul(grad, keep, out=of_branch), None, None
