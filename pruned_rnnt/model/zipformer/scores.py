"""Attention weights from scores: alignment of relative positions, masking, softmax.

Axes: N batch, H heads, T frames, S frames attended to, R = S + T relative positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pruned_rnnt.model.kernels.available import use_kernels, use_own_function
from pruned_rnnt.model.zipformer.schedule import Clock
from pruned_rnnt.ops.common.library import accumulator

# Low enough that its exponential is zero relative to any real score, and within float16.
_BLOCKED_SCORE = -1000.0
# Larger absolute scores are implausible and saturate the softmax, which then has no gradient.
_SCORE_LIMIT = 25.0
# Fraction of the batches on which the gradient counteracts such scores.
_PENALTY_PROBABILITY = 0.1


def masked_softmax(
    scores: Tensor,
    by_distance: Tensor | None,
    blocked: Tensor,
    penalty_switch: Tensor | None = None,
) -> Tensor:
    """Softmax over the S frames, computed in float32 and returned in the dtype of the scores.

    Blocked frames have weight 0, except in a row whose frames are all blocked.

    Args:
        scores: (N, H, T, S).
        by_distance: (N, H, T, R) scores by relative position, aligned and added to the scores.
        blocked: bool, broadcast to the scores.
        penalty_switch: (1,) float32 on the device; if it is 1, the effect of `limit_scores` is
            added. Needs fused kernels.
    """
    if not use_own_function(scores, differentiable=scores.requires_grad):
        if by_distance is None:
            total = torch.where(blocked, _BLOCKED_SCORE, scores)
        else:
            total = _total(scores, by_distance).masked_fill_(blocked, _BLOCKED_SCORE)
        return total.softmax(dim=-1).to(total.dtype)
    weights: Tensor = _MaskedSoftmax.apply(  # type: ignore[no-untyped-call]
        scores, by_distance, blocked, penalty_switch
    )
    return weights


def limit_scores(
    scores: Tensor, by_distance: Tensor | None, clock: Clock
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Adds a gradient against scores beyond +-25 to some of the batches; for training.

    Returns the arguments of `masked_softmax`: on these batches the sum of both scores and None,
    otherwise the two scores; and the switch if the decision for this batch is on the device. The
    added gradient has the mean size of the incoming one, because the effect of a fixed penalty
    would depend on the scale of the loss: negligible for a sum over a large batch, dominant for a
    mean over frames.
    """
    chosen = clock.choose(_PENALTY_PROBABILITY)
    if isinstance(chosen, Tensor):
        return scores, by_distance, chosen
    if not chosen:
        return scores, by_distance, None
    limited: Tensor = _LimitScores.apply(  # type: ignore[no-untyped-call]
        _total(scores, by_distance)
    )
    return limited, None, None


def _total(scores_NHTS: Tensor, by_distance_NHTR: Tensor | None) -> Tensor:
    if by_distance_NHTR is None:
        return scores_NHTS
    return scores_NHTS + _align_distances(by_distance_NHTR, scores_NHTS.size(-1))


def _align_distances(scores_NHTR: Tensor, width: int) -> Tensor:
    """(N, H, T, S + T), column r for distance r - S, to (N, H, T, S), column s for frame s.

    The distance from frame t to frame s is s - (S - T) - t, so row t needs S columns from T - t on.
    A view that skips the first T elements and has rows of R - 1 elements starts each row there.
    """
    count = scores_NHTR.size(-2)
    shorter_rows = scores_NHTR.flatten(-2)[..., count:].unflatten(-1, (count, width + count - 1))
    aligned_NHTS: Tensor = shorter_rows[..., :width]
    return aligned_NHTS


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
        size = grad.abs().mean(dtype=accumulator(grad.dtype))
        penalised: Tensor = grad + (side * size).to(grad.dtype)
        return penalised


class _MaskedSoftmax(torch.autograd.Function):
    """Calls aten's kernels directly, because softmax under autocast writes float32."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        by_distance: Tensor | None,
        blocked: Tensor,
        penalty_switch: Tensor | None,
    ) -> Tensor:
        weights: Tensor
        ctx.fused = use_kernels(scores)
        if ctx.fused:
            from pruned_rnnt.model.kernels.softmax import Penalty, empty_sides
            from pruned_rnnt.model.kernels.softmax import masked_softmax as fused_softmax

            if by_distance is not None:
                by_distance = by_distance.contiguous()
            ctx.penalty = None
            if penalty_switch is not None:
                ctx.penalty = Penalty(penalty_switch, empty_sides(scores))
            weights = fused_softmax(
                scores.contiguous(),
                by_distance,
                blocked,
                blocked_score=_BLOCKED_SCORE,
                penalty=ctx.penalty,
                score_limit=_SCORE_LIMIT,
            )
            ctx.save_for_backward(weights, blocked)
            ctx.distances = None if by_distance is None else by_distance.shape
            return weights
        total = scores.clone() if by_distance is None else _total(scores, by_distance)
        total = total.masked_fill_(blocked, _BLOCKED_SCORE)
        weights = torch.ops.aten._softmax(total, -1, False)
        ctx.save_for_backward(weights, blocked)
        ctx.distances = None if by_distance is None else by_distance.shape
        return weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        weights, blocked = ctx.saved_tensors
        if ctx.fused:
            from pruned_rnnt.model.kernels.softmax import masked_softmax_backward

            of_scores, of_distances = masked_softmax_backward(
                weights,
                grad.contiguous(),
                blocked,
                has_distance=ctx.distances is not None,
                penalty=ctx.penalty,
            )
            return of_scores, of_distances, None, None
        through = torch.ops.aten._softmax_backward_data(grad, weights, -1, weights.dtype)
        through = through.masked_fill_(blocked, 0.0)
        if ctx.distances is None:
            return through, None, None, None
        of_distances = through.new_zeros(ctx.distances)
        _align_distances(of_distances, through.size(-1)).copy_(through)
        return through, of_distances, None, None
