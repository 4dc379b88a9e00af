"""BiasNorm: x / RMS(x - bias) * exp(log_scale), over the last axis (arXiv 2310.11230, section 3.2).

One learned scale for all channels keeps some information on the size of x, which layer
normalisation takes away; the bias lets a large constant channel be left out of the size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.model.zipformer.gradient import limit_parameter

_LOG_SCALE_LIMIT = 1.5


class BiasNorm(nn.Module):
    """(..., dim) -> (..., dim), in the wider dtype of input and parameters."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.ones(()))
        self.bias = nn.Parameter(torch.randn(dim) * 1e-4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, self.bias.dtype))
        if not torch.is_grad_enabled():
            return x * _factor(x, self.bias, self.log_scale)
        log_scale: Tensor = self.log_scale
        if self.training:
            log_scale = limit_parameter(log_scale, -_LOG_SCALE_LIMIT, _LOG_SCALE_LIMIT)
        normed: Tensor = _BiasNorm.apply(x, self.bias, log_scale)  # type: ignore[no-untyped-call]
        return normed


def _factor(x: Tensor, bias: Tensor, log_scale: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x - bias, dim=-1, keepdim=True)
    factor: Tensor = norm.reciprocal() * (x.size(-1) ** 0.5 * log_scale.exp())
    return factor


class _BiasNorm(torch.autograd.Function):
    """Keeps x alone, where autograd would keep several tensors of its size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, log_scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias, log_scale)
        return x * _factor(x, bias, log_scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, bias, log_scale = ctx.saved_tensors
        centred = x - bias
        power = centred.square().mean(dim=-1, keepdim=True)
        factor = power.rsqrt() * log_scale.exp()
        product = (grad * x).sum(dim=-1, keepdim=True) * factor
        through_size = centred * (product / (power * x.size(-1)))
        return (
            grad * factor - through_size,
            through_size.flatten(0, -2).sum(dim=0),
            product.sum(),
        )
