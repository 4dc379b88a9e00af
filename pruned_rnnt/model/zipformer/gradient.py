"""Changes of the gradient on its way back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.model.zipformer.schedule import Clock

# Share of the batches on which parameters are limited.
_LIMIT_PROBABILITY = 0.6
# (low, high) of a parameter's elements.
Limits = tuple[float, float]


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


def draw_limits(clock: Clock, low: float, high: float) -> Limits | None:
    """For `lead_back`, on some of the batches; to be called in training alone."""
    return (low, high) if clock.chance(_LIMIT_PROBABILITY) else None


def lead_back(grad: Tensor, value: Tensor, limits: Limits | None) -> Tensor:
    """The gradient of a parameter, which leads elements outside of the limits back in."""
    if limits is None:
        return grad
    low, high = limits
    size = grad.abs()
    grad = torch.where(value > high, size, grad)
    return torch.where(value < low, size.neg_(), grad)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None
