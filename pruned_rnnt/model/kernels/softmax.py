"""Attention weights from scores in one pass: alignment of distances, masking, softmax.

    weights[t, s] = softmax_s( scores[t, s] + by_distance[t, T - t + s] )    over s not blocked

Axes: N sequences, H heads, T frames, S frames attended to, R = S + T distances. One program takes
one row t of one head, with its S columns in registers:

    by_distance row t  | . . . . . . . . . . . . |    R columns
                              |<----- S ----->|       of which row t reads S from T - t on

torch takes three kernels forward and four backward, over tensors of S and of R columns.

A CUDA graph can also carry a penalty on scores beyond a limit, which the device switches on and off
(see `limit_scores` in `pruned_rnnt.model.zipformer.scores`): the forward kernel then stores the
side (-1, 0 or 1) on which each score is outside, in two bits, and a last backward kernel adds this
side times the mean absolute gradient. If the switch is 0, only the switch is read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import divide_up, kernel, power_of_two

# Rows of one program of the penalty.
_ROWS = 16
# Sides in a number of 32 bits.
_PACKED = 16


@triton.jit
def _own_row(frames, seen, BLOCK_S: tl.constexpr):
    """The program's pair of sequence and head, its frame, its row, the columns, and a mask."""
    # One axis: a grid may have only 65,535 pairs along another.
    pair = (tl.program_id(0) // frames).to(tl.int64)
    frame = tl.program_id(0) % frames
    column = tl.arange(0, BLOCK_S)
    inside = column < seen
    row = pair * frames + frame
    return pair, frame, row, column, inside


@kernel("heads", "frames", "blocked_n", "blocked_t")
def _forward_kernel(
    scores_ptr,
    distance_ptr,
    blocked_ptr,
    switch_ptr,
    weights_ptr,
    side_ptr,
    heads,
    frames,
    seen,
    blocked_n,
    blocked_t,
    BLOCKED_SCORE: tl.constexpr,
    LIMIT: tl.constexpr,
    HAS_DISTANCE: tl.constexpr,
    HAS_SWITCH: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    pair, frame, row, column, inside = _own_row(frames, seen, BLOCK_S)
    score = tl.load(scores_ptr + row * seen + column, mask=inside, other=0.0)
    # The sum is rounded to the dtype of the scores, as in plain torch.
    if HAS_DISTANCE:
        first = row * (seen + frames) + frames - frame
        distance = tl.load(distance_ptr + first + column, mask=inside, other=0.0)
        score = (score.to(tl.float32) + distance.to(tl.float32)).to(scores_ptr.dtype.element_ty)
    score = score.to(tl.float32)
    # Two conditions, as HAS_SWITCH is a constant: without a switch, nothing is loaded.
    if HAS_SWITCH:  # noqa: SIM102
        if tl.load(switch_ptr) > 0.0:
            # 1 above, 2 below.
            side = (score > LIMIT).to(tl.int32) + 2 * (score < -LIMIT).to(tl.int32)
            side = tl.reshape(tl.where(inside, side, 0), (BLOCK_S // PACKED, PACKED))
            packed = tl.sum(side << (2 * tl.arange(0, PACKED))[None, :], axis=1)
            word = tl.arange(0, BLOCK_S // PACKED)
            words = (seen + PACKED - 1) // PACKED
            tl.store(side_ptr + row * words + word, packed, mask=word < words)
    sequence = pair // heads
    blocked = tl.load(
        blocked_ptr + sequence * blocked_n + frame * blocked_t + column, mask=inside, other=1
    )
    score = tl.where(blocked != 0, BLOCKED_SCORE, score)
    score = tl.where(inside, score, float("-inf"))
    exponential = tl.exp(score - tl.max(score, axis=0))
    weight = exponential / tl.sum(exponential, axis=0)
    place = weights_ptr + row * seen + column
    tl.store(place, weight.to(weights_ptr.dtype.element_ty), mask=inside)


@kernel("heads", "frames", "blocked_n", "blocked_t")
def _backward_kernel(
    weights_ptr,
    grad_ptr,
    blocked_ptr,
    of_scores_ptr,
    of_distance_ptr,
    sizes_ptr,
    heads,
    frames,
    seen,
    blocked_n,
    blocked_t,
    HAS_DISTANCE: tl.constexpr,
    HAS_SIZES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    pair, frame, row, column, inside = _own_row(frames, seen, BLOCK_S)
    weight = tl.load(weights_ptr + row * seen + column, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * seen + column, mask=inside, other=0.0).to(tl.float32)
    sequence = pair // heads
    blocked = tl.load(
        blocked_ptr + sequence * blocked_n + frame * blocked_t + column, mask=inside, other=1
    )
    through = weight * (grad - tl.sum(weight * grad, axis=0))
    through = tl.where(blocked != 0, 0.0, through).to(of_scores_ptr.dtype.element_ty)
    tl.store(of_scores_ptr + row * seen + column, through, mask=inside)
    if HAS_SIZES:
        tl.store(sizes_ptr + row, tl.sum(tl.abs(through.to(tl.float32)), axis=0))
    if HAS_DISTANCE:
        # Columns that the row does not read have no gradient.
        distances = seen + frames
        first = frames - frame
        place = of_distance_ptr + row * distances
        every = tl.arange(0, BLOCK_R)
        outside = (every < first) | (every >= first + seen)
        tl.store(
            place + every,
            tl.zeros((BLOCK_R,), dtype=of_distance_ptr.dtype.element_ty),
            mask=outside & (every < distances),
        )
        tl.store(place + first + column, through, mask=inside)


@kernel("rows", "frames")
def _penalty_kernel(
    side_ptr,
    switch_ptr,
    total_size_ptr,
    of_scores_ptr,
    of_distance_ptr,
    rows,
    frames,
    seen,
    HAS_DISTANCE: tl.constexpr,
    ROWS: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    if tl.load(switch_ptr) > 0.0:
        column = tl.arange(0, BLOCK_S)
        mean = tl.load(total_size_ptr) / rows / seen
        words = (seen + PACKED - 1) // PACKED
        for index in range(ROWS):
            row = tl.program_id(0).to(tl.int64) * ROWS + index
            inside = (column < seen) & (row < rows)
            place = row * seen + column
            packed = tl.load(side_ptr + row * words + column // PACKED, mask=inside, other=0)
            code = (packed >> (2 * (column % PACKED))) & 3
            side = tl.where(code == 1, 1.0, tl.where(code == 2, -1.0, 0.0))
            through = tl.load(of_scores_ptr + place, mask=inside, other=0.0).to(tl.float32)
            through = (through + side * mean).to(of_scores_ptr.dtype.element_ty)
            tl.store(of_scores_ptr + place, through, mask=inside)
            if HAS_DISTANCE:
                first = row * (seen + frames) + frames - row % frames
                tl.store(of_distance_ptr + first + column, through, mask=inside)


class Penalty(NamedTuple):
    """The penalty on scores beyond a limit.

    switch: (1,) float32, 0 or 1.
    sides: int32, from `empty_sides`; written by the forward pass if the switch is on.
    """

    switch: Tensor
    sides: Tensor


def empty_sides(scores_NHTS: Tensor) -> Tensor:
    """Memory for the sides of scores."""
    shape = (*scores_NHTS.shape[:-1], divide_up(scores_NHTS.size(-1), _PACKED))
    return torch.empty(shape, dtype=torch.int32, device=scores_NHTS.device)


def masked_softmax(
    scores_NHTS: Tensor,
    by_distance_NHTR: Tensor | None,
    blocked: Tensor,
    *,
    blocked_score: float,
    penalty: Penalty | None = None,
    score_limit: float = 0.0,
) -> Tensor:
    """The weights, (N, H, T, S), in the dtype of the scores; float32 inside.

    Args:
        scores_NHTS, by_distance_NHTR: contiguous.
        blocked: bool (N, 1, 1, S) or (N, 1, T, S), contiguous.
        penalty: fills its `sides`, for scores beyond +-score_limit.
    """
    batch, heads, frames, seen = scores_NHTS.shape
    weights = torch.empty_like(scores_NHTS)
    block_s = max(power_of_two(seen), _PACKED)
    _forward_kernel(
        (batch * heads * frames,),
        scores_NHTS,
        by_distance_NHTR,
        blocked.view(torch.uint8),
        None if penalty is None else penalty.switch,
        weights,
        None if penalty is None else penalty.sides,
        heads,
        frames,
        seen,
        *_blocked_strides(blocked),
        blocked_score,
        score_limit,
        by_distance_NHTR is not None,
        penalty is not None,
        _PACKED,
        block_s,
        num_warps=_warps(block_s),
    )
    return weights


def masked_softmax_backward(
    weights_NHTS: Tensor,
    grad_NHTS: Tensor,
    blocked: Tensor,
    *,
    has_distance: bool,
    penalty: Penalty | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the scores and of the distances; all arguments contiguous."""
    batch, heads, frames, seen = weights_NHTS.shape
    of_scores = torch.empty_like(weights_NHTS)
    of_distance = None
    if has_distance:
        of_distance = weights_NHTS.new_empty((batch, heads, frames, seen + frames))
    rows = batch * heads * frames
    sizes = None
    if penalty is not None:
        sizes = weights_NHTS.new_empty((rows,), dtype=torch.float32)
    block_s = power_of_two(seen)
    _backward_kernel(
        (batch * heads * frames,),
        weights_NHTS,
        grad_NHTS,
        blocked.view(torch.uint8),
        of_scores,
        of_distance,
        sizes,
        heads,
        frames,
        seen,
        *_blocked_strides(blocked),
        has_distance,
        sizes is not None,
        block_s,
        power_of_two(seen + frames),
        num_warps=_warps(block_s),
    )
    if penalty is not None and sizes is not None:
        _penalty_kernel(
            (divide_up(rows, _ROWS),),
            penalty.sides,
            penalty.switch,
            sizes.sum(),
            of_scores,
            of_distance,
            rows,
            frames,
            seen,
            has_distance,
            _ROWS,
            _PACKED,
            block_s,
            num_warps=_warps(block_s),
        )
    return of_scores, of_distance


def _blocked_strides(blocked: Tensor) -> tuple[int, int]:
    """Elements between sequences and between frames; 0 along an axis of one element."""
    sequences, frames = (blocked.stride(axis) if blocked.size(axis) > 1 else 0 for axis in (0, 2))
    return sequences, frames


def _warps(columns: int) -> int:
    return max(min(columns // 256, 8), 1)
