"""Attention weights from scores: alignment of relative positions, masking, softmax.

Axes: N batch, H heads, T frames, S frames attended to, P position width of a head, R = S + T
relative positions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.model.kernels.available import use_kernels
from pruned_rnnt.model.own_function import applied
from pruned_rnnt.model.zipformer.schedule import Clock
from pruned_rnnt.ops.common.library import accumulator

# Low enough that its exponential is zero relative to any real score, and within float16.
_BLOCKED_SCORE = -1000.0
# Larger absolute scores are implausible and saturate the softmax, which then has no gradient.
_SCORE_LIMIT = 25.0
# Fraction of the batches on which the gradient counteracts such scores.
_PENALTY_PROBABILITY = 0.1


class ByPosition(NamedTuple):
    """Scores by relative position: query . position of each head.

    query_NTC: (N, T, H * P), a part of a projection.
    positions_HPR: which all sequences share; column r is for the distance r - S.
    """

    query_NTC: Tensor
    positions_HPR: Tensor


class SharedWeights(NamedTuple):
    """Attention weights for their three readers.

    first_NTS: (N, T, S), those of the first head.
    one_NHTS, other_NHTS: (N, H, T, S), all weights.
    """

    first_NTS: Tensor
    one_NHTS: Tensor
    other_NHTS: Tensor


def split_heads(x_NTC: Tensor, heads: int) -> Tensor:
    """(N, T, H * K) -> (N, H, T, K)."""
    heads_NHTK: Tensor = x_NTC.unflatten(-1, (heads, -1)).transpose(1, 2)
    return heads_NHTK


def masked_softmax(
    scores: Tensor,
    by_position: ByPosition | None,
    blocked: Tensor,
    penalty_switch: Tensor | None = None,
) -> SharedWeights:
    """Softmax over the S frames, computed in float32 and returned in the dtype of the scores.

    Blocked frames have weight 0, except in a row whose frames are all blocked.

    Args:
        scores: (N, H, T, S).
        by_position: added to the scores.
        blocked: bool, broadcast to the scores.
        penalty_switch: (1,) float32 on the device; if it is 1, the effect of `limit_scores` is
            added. Needs fused kernels.
    """
    if use_kernels(scores):
        query, positions = by_position or (None, None)
        return SharedWeights(
            *applied(_FusedSoftmax, scores, query, positions, blocked, penalty_switch)
        )
    by_distance = None if by_position is None else _distance_scores(by_position)
    if not (torch.is_grad_enabled() and scores.requires_grad):
        if by_distance is None:
            total = torch.where(blocked, _BLOCKED_SCORE, scores)
        else:
            total = _total(scores, by_distance).masked_fill_(blocked, _BLOCKED_SCORE)
        weights = total.softmax(dim=-1).to(total.dtype)
    else:
        weights = _MaskedSoftmax.apply(  # type: ignore[no-untyped-call]
            scores, by_distance, blocked
        )
    return SharedWeights(weights[:, 0], weights, weights)


def limit_scores(
    scores: Tensor, by_position: ByPosition | None, clock: Clock
) -> tuple[Tensor, ByPosition | None, Tensor | None]:
    """Adds a gradient against scores beyond +-25 to some of the batches; for training.

    Returns the arguments of `masked_softmax`: on these batches the sum of both scores and None,
    otherwise what was given; and the switch if the decision for this batch is on the device. The
    added gradient has the mean size of the incoming one, because the effect of a fixed penalty
    would depend on the scale of the loss: negligible for a sum over a large batch, dominant for a
    mean over frames.
    """
    chosen = clock.choose(_PENALTY_PROBABILITY)
    if isinstance(chosen, Tensor):
        return scores, by_position, chosen
    if not chosen:
        return scores, by_position, None
    by_distance = None if by_position is None else _distance_scores(by_position)
    limited: Tensor = _LimitScores.apply(  # type: ignore[no-untyped-call]
        _total(scores, by_distance)
    )
    return limited, None, None


def _distance_scores(by_position: ByPosition) -> Tensor:
    """(N, H, T, R): the query's product with the positions at all distances."""
    query_NTC, positions_HPR = by_position
    return split_heads(query_NTC, positions_HPR.size(0)) @ positions_HPR.to(query_NTC.dtype)


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
    def forward(ctx: Any, scores: Tensor, by_distance: Tensor | None, blocked: Tensor) -> Tensor:
        total = scores.clone() if by_distance is None else _total(scores, by_distance)
        total = total.masked_fill_(blocked, _BLOCKED_SCORE)
        weights: Tensor = torch.ops.aten._softmax(total, -1, False)
        ctx.save_for_backward(weights, blocked)
        ctx.distances = None if by_distance is None else by_distance.shape
        return weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        weights, blocked = ctx.saved_tensors
        through = torch.ops.aten._softmax_backward_data(grad, weights, -1, weights.dtype)
        through = through.masked_fill_(blocked, 0.0)
        if ctx.distances is None:
            return through, None, None
        of_distances = through.new_zeros(ctx.distances)
        _align_distances(of_distances, through.size(-1)).copy_(through)
        return through, of_distances, None


class _FusedSoftmax(torch.autograd.Function):
    """Makes the tensors of `SharedWeights`, so that one kernel adds up their gradients. Saves the
    projection, as other functions do, and no scores by position."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        query: Tensor | None,
        positions: Tensor | None,
        blocked: Tensor,
        penalty_switch: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from pruned_rnnt.model.kernels.positions import packed_positions
        from pruned_rnnt.model.kernels.softmax import Penalty, empty_sides
        from pruned_rnnt.model.kernels.softmax import masked_softmax as fused_softmax

        ctx.penalty = None
        if query is not None:
            query = query.to(scores.dtype)
        if penalty_switch is not None:
            ctx.penalty = Penalty(penalty_switch, empty_sides(scores))
        words = None
        if positions is not None:
            ctx.positions_dtype = positions.dtype
            words = packed_positions(positions.to(scores.dtype))
        weights = fused_softmax(
            scores.contiguous(),
            _positions(query, words),
            blocked,
            blocked_score=_BLOCKED_SCORE,
            penalty=ctx.penalty,
            score_limit=_SCORE_LIMIT,
        )
        ctx.save_for_backward(weights, blocked, query, words)
        return weights[:, 0], weights.view_as(weights), weights.view_as(weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        from pruned_rnnt.model.kernels.softmax import WeightsGradients, masked_softmax_backward

        weights, blocked, query, words = ctx.saved_tensors
        found = masked_softmax_backward(
            weights,
            _positions(query, words),
            blocked,
            WeightsGradients(*(grad.contiguous() for grad in grads)),
            penalty=ctx.penalty,
            positions_dtype=ctx.positions_dtype if ctx.needs_input_grad[2] else None,
        )
        return found.scores_NHTS, found.query_NTC, found.positions_HPR, None, None


def _positions(query: Tensor | None, words: Tensor | None) -> Any:
    """The arguments of the fused kernels."""
    from pruned_rnnt.model.kernels.positions import Positions

    return None if query is None or words is None else Positions(query, words)
