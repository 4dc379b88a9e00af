"""Identities which change the gradient on its way back, and a softmax that saves memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pruned_rnnt.model.zipformer.casts import wide_dtype
from pruned_rnnt.model.zipformer.schedule import Clock

# Scores beyond this size are implausible, and a softmax of them has no gradient left.
_SCORE_LIMIT = 25.0
# Low enough that its exponential is zero beside any real score, and within float16.
_BLOCKED_SCORE = -1000.0
# Share of the batches on which these safeguards act.
_LIMIT_PROBABILITY = 0.6
_PENALTY_PROBABILITY = 0.1
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


def limit_scores(
    scores: Tensor, more_scores: Tensor | None, clock: Clock
) -> tuple[Tensor, Tensor | None]:
    """Two parts of attention scores, with a gradient of average size against sums beyond 25.

    A penalty of fixed size would depend on how the loss is scaled: harmless beside the gradient of
    a sum over a large batch, it is many times that of a mean over frames.

    Acts on some of the batches, where it returns the sum; to be called in training alone.
    """
    if not clock.chance(_PENALTY_PROBABILITY):
        return scores, more_scores
    total = scores if more_scores is None else scores + more_scores
    limited: Tensor = _LimitScores.apply(total)  # type: ignore[no-untyped-call]
    return limited, None


def masked_softmax(scores: Tensor, more_scores: Tensor | None, blocked: Tensor) -> Tensor:
    """Softmax of the sum over the last axis, computed in float32, kept in the dtype of the scores.

    What is blocked gets no weight, but where everything is.
    """
    if not (torch.is_grad_enabled() and scores.requires_grad):
        total = scores if more_scores is None else scores + more_scores
        return torch.where(blocked, _BLOCKED_SCORE, total).softmax(dim=-1).to(total.dtype)
    weights: Tensor = _MaskedSoftmax.apply(  # type: ignore[no-untyped-call]
        scores, more_scores, blocked
    )
    return weights


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


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
        size = grad.abs().mean(dtype=wide_dtype(grad.dtype))
        penalised: Tensor = grad + (side * size).to(grad.dtype)
        return penalised


class _MaskedSoftmax(torch.autograd.Function):
    """By torch's own kernels, which autocast would let write float32."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, more_scores: Tensor | None, blocked: Tensor) -> Tensor:
        total = scores.clone() if more_scores is None else scores + more_scores
        total = total.masked_fill_(blocked, _BLOCKED_SCORE)
        weights: Tensor = torch.ops.aten._softmax(total, -1, False)
        ctx.save_for_backward(weights, blocked)
        ctx.of_sum = more_scores is not None
        return weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        weights, blocked = ctx.saved_tensors
        through = torch.ops.aten._softmax_backward_data(grad, weights, -1, weights.dtype)
        through = through.masked_fill_(blocked, 0.0)
        return through, through if ctx.of_sum else None, None
