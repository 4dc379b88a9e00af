"""Whiten: keeps activations from collapsing to few directions by bending the gradient.

Axes: R rows (all frames of a batch), G groups of channels, C channels of a group.

The forward pass changes nothing. For centred rows X_g of each group and S_g = X_g^T X_g,

    metric = mean of the diagonals of S_g S_g / (mean of the diagonals of S_g)^2  >= 1,

which is 1 when all directions have the same variance (arXiv 2310.11230, section 3.4). Where it is
over the limit, its gradient, which points along X_g (S_g - m I) with m = the mean of the diagonals
of S_g S_g over that of S_g, is added with `strength` times the norm of the incoming gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.model.zipformer.schedule import Clock, Schedule, chance

# Share of the batches on which the metric is looked at: often while it is over the limit.
_PROBABILITY_WITHIN, _PROBABILITY_OVER = 0.025, 0.25
_TINY = 1e-20


class Whiten(nn.Module):
    """Identity with the gradient described above, on some of the batches; channels come last.

    `over_limit` (a buffer, so that checkpoints hold it) is what the last look found. It is written
    on the device in the backward pass and read by `refresh` alone, once a step, so that no forward
    pass waits for the device.

    Args:
        limit: the metric that is tolerated.
        strength: size of the added gradient against the incoming one.
        groups: G.
    """

    over_limit: Tensor

    def __init__(
        self, clock: Clock, limit: float | Schedule, strength: float = 0.01, groups: int = 1
    ) -> None:
        super().__init__()
        self.clock = clock
        self.limit = limit
        self.strength = strength
        self.groups = groups
        self.probability = _PROBABILITY_OVER
        self.register_buffer("over_limit", torch.ones((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled() and x.requires_grad):
            return x
        if not chance(self.probability):
            return x
        limit = self.clock.read(self.limit)
        whitened: Tensor = _Whiten.apply(  # type: ignore[no-untyped-call]
            x, self.over_limit, self.groups, limit, self.strength
        )
        return whitened


def refresh(whiteners: list[Whiten]) -> None:
    """Let each whitener look as often as its `over_limit` asks for: one copy from the device."""
    over = torch.stack([whitener.over_limit for whitener in whiteners]).tolist()
    for whitener, is_over in zip(whiteners, over, strict=True):
        whitener.probability = _PROBABILITY_OVER if is_over else _PROBABILITY_WITHIN


class _Whiten(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, over_limit: Tensor, groups: int, limit: float, strength: float
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.over_limit, ctx.groups, ctx.limit, ctx.strength = over_limit, groups, limit, strength
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (x,) = ctx.saved_tensors
        wide = x if x.dtype == torch.float64 else x.float()
        rows_GRC = wide.reshape(-1, ctx.groups, x.size(-1) // ctx.groups).transpose(0, 1)
        rows_GRC = rows_GRC - rows_GRC.mean(dim=1, keepdim=True)
        scatter_GCC = rows_GRC.transpose(1, 2) @ rows_GRC
        mean_diagonal = scatter_GCC.diagonal(dim1=1, dim2=2).mean()
        mean_square = scatter_GCC.square().sum() / x.size(-1)
        over = mean_square >= ctx.limit * (mean_diagonal.square() + _TINY)
        ctx.over_limit.copy_(over)
        centre = mean_square / (mean_diagonal + _TINY)
        push_GRC = rows_GRC @ scatter_GCC - centre * rows_GRC
        push = push_GRC.transpose(0, 1).reshape(x.shape)
        norm = torch.linalg.vector_norm(grad, dtype=wide.dtype)
        factor = ctx.strength * norm / (torch.linalg.vector_norm(push) + _TINY)
        return grad + (push * torch.where(over, factor, 0.0)).to(grad.dtype), None, None, None, None
