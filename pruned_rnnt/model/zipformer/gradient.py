"""Identities which change the gradient on its way back, and a softmax that saves memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.model.zipformer.schedule import chance

# Scores beyond this size are implausible, and a softmax of them has no gradient left.
_SCORE_LIMIT = 25.0
# Share of the batches on which these safeguards act.
_LIMIT_PROBABILITY = 0.6
_PENALTY_PROBABILITY = 0.1


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


def limit_parameter(value: Tensor, low: float, high: float) -> Tensor:
    """`value`, whose elements outside [low, high] only ever see gradients which lead back in.

    Acts on some of the batches; to be called in training alone.
    """
    if not chance(_LIMIT_PROBABILITY):
        return value
    limited: Tensor = _LimitParameter.apply(value, low, high)  # type: ignore[no-untyped-call]
    return limited


def limit_scores(scores: Tensor) -> Tensor:
    """Attention scores, with a gradient of average size against sizes beyond 25.

    A penalty of fixed size would depend on how the loss is scaled: harmless beside the gradient of
    a sum over a large batch, it is many times that of a mean over frames.

    Acts on some of the batches; to be called in training alone.
    """
    if not chance(_PENALTY_PROBABILITY):
        return scores
    limited: Tensor = _LimitScores.apply(scores)  # type: ignore[no-untyped-call]
    return limited


def softmax(scores: Tensor) -> Tensor:
    """Softmax over the last axis, computed in float32 and kept in the dtype of the scores."""
    if not (torch.is_grad_enabled() and scores.requires_grad):
        return scores.softmax(dim=-1).to(scores.dtype)
    weights: Tensor = _Softmax.apply(scores)  # type: ignore[no-untyped-call]
    return weights


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


class _LimitParameter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(value)
        ctx.low, ctx.high = low, high
        return value.view_as(value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (value,) = ctx.saved_tensors
        grad = torch.where(value < ctx.low, -grad.abs(), grad)
        grad = torch.where(value > ctx.high, grad.abs(), grad)
        return grad, None, None


class _LimitScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        side = (scores > _SCORE_LIMIT).to(torch.int8) - (scores < -_SCORE_LIMIT).to(torch.int8)
        ctx.save_for_backward(side)
        return scores.view_as(scores)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (side,) = ctx.saved_tensors
        size = grad.abs().mean(dtype=torch.promote_types(grad.dtype, torch.float32))
        penalised: Tensor = grad + (side * size).to(grad.dtype)
        return penalised


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        weights = scores.softmax(dim=-1).to(scores.dtype)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        wide = torch.promote_types(weights.dtype, torch.float32)
        weighted = grad.to(wide) * weights
        through_sum = weights * weighted.sum(dim=-1, keepdim=True)
        scores_grad: Tensor = (weighted - through_sum).to(weights.dtype)
        return scores_grad
