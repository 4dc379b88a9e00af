"""Modules and functions that change gradients in the backward pass."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.model.kernels.available import use_kernels
from pruned_rnnt.model.side_branch import beside
from pruned_rnnt.model.zipformer.schedule import Clock, Schedule

# Fraction of the batches on which the gradients of limited parameters change.
_LIMIT_PROBABILITY = 0.6
# Lowest and highest value of a parameter's elements; on the device, (2,) float32.
Limits = tuple[float, float] | Tensor


class ScaleGradient(nn.Module):
    """Multiplies the gradient by a constant in training, to keep it in the range of float16."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        scaled: Tensor = _ScaleGradient.apply(x, self.scale)  # type: ignore[no-untyped-call]
        return scaled


def sample_limits(clock: Clock, low: float | Schedule, high: float) -> Limits | None:
    """Limits for `grad_towards_limits` on a random part of the batches, else None; for training.

    In a captured pass they are on the device, and infinite instead of None.
    """

    def sample() -> tuple[float, float]:
        if clock.bernoulli(_LIMIT_PROBABILITY):
            return clock.value(low), high
        return -math.inf, math.inf

    if clock.recorder is not None:
        return clock.recorder.add(sample, 2)
    limits = sample()
    return None if limits[0] == -math.inf else limits


def grad_towards_limits(grad: Tensor, value: Tensor, limits: Limits | None) -> Tensor:
    """The gradient of a parameter, with its sign set to move elements back within the limits."""
    if limits is None:
        return grad
    low, high = limits.unbind() if isinstance(limits, Tensor) else limits
    size = grad.abs()
    grad = torch.where(value > high, size, grad)
    return torch.where(value < low, size.neg_(), grad)


def sum_towards_limits(parts_PC: Tensor, value: Tensor, limits: Limits | None) -> Tensor:
    """The gradient of a parameter of C elements from parts of it, then `grad_towards_limits`."""
    if not use_kernels(parts_PC, value):
        grad = parts_PC.sum(dim=0).view_as(value).to(value.dtype)
        return grad_towards_limits(grad, value, limits)
    from pruned_rnnt.model.kernels.rows import sums_of_parts

    on_device = limits if isinstance(limits, Tensor) else None
    with beside(parts_PC, where=value.is_leaf):
        grad = sums_of_parts(parts_PC, value.dtype, value, on_device).view_as(value)
    return grad if on_device is not None else grad_towards_limits(grad, value, limits)


def own_gradient(x: Tensor) -> Tensor:
    """Returns x; modules before it get a copy of its gradient, which they may change in place."""
    owned: Tensor = _OwnGradient.apply(x)  # type: ignore[no-untyped-call]
    return owned


class _OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None
