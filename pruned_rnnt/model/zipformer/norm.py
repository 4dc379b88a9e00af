"""BiasNorm: x / RMS(x - bias) * exp(log_scale), over the last axis (arXiv 2310.11230, section 3.2).

One learned scale for all channels keeps some information on the norm of x, which layer
normalisation removes; the bias can exclude a large constant channel from the norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.model.kernels.available import use_kernels, use_own_function
from pruned_rnnt.model.own_function import applied
from pruned_rnnt.model.zipformer.gradient import (
    Limits,
    grad_towards_limits,
    sample_limits,
    sum_towards_limits,
)
from pruned_rnnt.model.zipformer.schedule import Clock

_LOG_SCALE_LIMIT = 1.5


class BiasNorm(nn.Module):
    """(..., dim) -> (..., dim), in the promoted dtype of input and parameters."""

    def __init__(self, clock: Clock, dim: int) -> None:
        super().__init__()
        self.clock = clock
        self.log_scale = nn.Parameter(torch.ones(()))
        self.bias = nn.Parameter(torch.randn(dim) * 1e-4)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.bias.dtype:
            x = x.to(torch.promote_types(x.dtype, self.bias.dtype))
        if not use_own_function(x):
            return x * _factor(x, self.bias, self.log_scale)[0]
        limits = self.sample_limits() if self.training else None
        normed: Tensor = applied(_BiasNorm, x, self.bias, self.log_scale, limits)
        return normed

    def sample_limits(self) -> Limits | None:
        """Limits of the logarithm of the scale on this batch."""
        return sample_limits(self.clock, -_LOG_SCALE_LIMIT, _LOG_SCALE_LIMIT)


def _factor(x: Tensor, bias: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
    """exp(log_scale) / RMS(x - bias), and the norm of x - bias."""
    norm = torch.linalg.vector_norm(x - bias, dim=-1, keepdim=True)
    return (log_scale.exp() * x.size(-1) ** 0.5) / norm, norm


class _BiasNorm(torch.autograd.Function):
    """Saves only x, whereas autograd would save several tensors of its size."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor, log_scale: Tensor, limits: Limits | None
    ) -> Tensor:
        ctx.fused = use_kernels(x)
        if ctx.fused:
            from pruned_rnnt.model.kernels.norms import bias_norm

            x = x.contiguous()
            normed, factor = bias_norm(x, bias, log_scale)
            ctx.save_for_backward(x, bias, log_scale, factor)
            ctx.limits = limits
            return normed
        factor, norm = _factor(x, bias, log_scale)
        ctx.save_for_backward(x, bias, log_scale, factor, norm)
        ctx.limits = limits
        return x * factor

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        if ctx.fused:
            from pruned_rnnt.model.kernels.norms import bias_norm_backward

            x, bias, log_scale, factor = ctx.saved_tensors
            of_x, of_bias, of_scale = bias_norm_backward(
                x, bias, log_scale, factor, grad.contiguous()
            )
            of_bias = sum_towards_limits(of_bias, bias, None)
            return of_x, of_bias, sum_towards_limits(of_scale, log_scale, ctx.limits), None
        x, bias, log_scale, factor, norm = ctx.saved_tensors
        product = (grad * x).sum(dim=-1, keepdim=True).mul_(factor)
        through_size = (bias - x).mul_(product / norm.square())
        return (
            torch.addcmul(through_size, grad, factor),
            through_size.flatten(0, -2).sum(dim=0).neg_(),
            grad_towards_limits(product.sum(), log_scale, ctx.limits),
            None,
        )
