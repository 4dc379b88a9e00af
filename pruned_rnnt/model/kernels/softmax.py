"""Attention weights from scores in one pass: scores by position, masking, softmax.

    weights[t, s] = softmax_s( scores[t, s] + by_position[t, s] )    over s not blocked

Axes: N sequences, H heads, T frames, S frames attended to, P position width of a head. One program
takes one row t of one head in BLOCK_N sequences, with its S columns in registers. `positions` has
the scores by position.

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

from pruned_rnnt.model.kernels.launch import column_block, divide_up, kernel
from pruned_rnnt.model.kernels.positions import (
    Positions,
    position_of,
    positions_gradient,
    store_of_query,
    words_of_row,
)
from pruned_rnnt.model.kernels.rows import as_rows

# Sequences whose rows a program takes, forward and backward, unless rows have more columns. In
# smaller batches some rows are masked: tiles of their own would be more variants to compile.
_SEQUENCES, _SEQUENCES_BACKWARD, _FEW_COLUMNS = 4, 2, 2048
# Rows of one program of the penalty.
_ROWS = 16
# Sides in a number of 32 bits.
_PACKED = 16


@triton.jit
def _own_rows(sequences, heads, frames, seen, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr):
    """The program's head, frame and sequences (N,), the columns (S,), and masks of these and of the
    tile (N, S)."""
    # One axis: a grid may have only 65,535 programs along another.
    frame = (tl.program_id(0) % frames).to(tl.int64)
    head = tl.program_id(0) // frames % heads
    first = (tl.program_id(0) // frames // heads).to(tl.int64) * BLOCK_N
    sequence = first + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_S)
    is_there, inside = sequence < sequences, column < seen
    return head, frame, sequence, column, is_there, inside, is_there[:, None] & inside[None, :]


@kernel("sequences", "heads", "frames")
def _forward_kernel(
    scores_ptr,
    query_ptr,
    words_ptr,
    blocked_ptr,
    switch_ptr,
    weights_ptr,
    side_ptr,
    sequences,
    heads,
    frames,
    seen,
    query_stride,
    blocked_n,
    blocked_t,
    BLOCKED_SCORE: tl.constexpr,
    LIMIT: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SWITCH: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    head, frame, sequence, column, is_there, inside, in_tile = _own_rows(
        sequences, heads, frames, seen, BLOCK_N, BLOCK_S
    )
    row = (sequence * heads + head) * frames + frame
    own = row[:, None] * seen + column[None, :]
    score = tl.load(scores_ptr + own, mask=in_tile, other=0.0).to(tl.float32)
    if WIDTH > 0:
        dtype: tl.constexpr = query_ptr.dtype.element_ty
        each: tl.constexpr = 64 // dtype.primitive_bitwidth
        groups: tl.constexpr = (WIDTH + each - 1) // each
        queries = query_ptr + (sequence * frames + frame) * query_stride + head * WIDTH
        for group in tl.static_range(groups):
            words = words_of_row(
                words_ptr, group, head, frame, frames, seen, column, inside, groups
            )
            for index in tl.static_range(each):
                if group * each + index < WIDTH:
                    place = queries + group * each + index
                    query = tl.load(place, mask=is_there, other=0.0).to(tl.float32)
                    score += query[:, None] * position_of(words, index, dtype)
    # Two conditions, as HAS_SWITCH is a constant: without a switch, nothing is loaded.
    if HAS_SWITCH:  # noqa: SIM102
        if tl.load(switch_ptr) > 0.0:
            # 1 above, 2 below.
            side = (score > LIMIT).to(tl.int32) + 2 * (score < -LIMIT).to(tl.int32)
            side = tl.reshape(tl.where(in_tile, side, 0), (BLOCK_N, BLOCK_S // PACKED, PACKED))
            packed = tl.sum(side << (2 * tl.arange(0, PACKED))[None, None, :], axis=2)
            word = tl.arange(0, BLOCK_S // PACKED)[None, :]
            most = (seen + PACKED - 1) // PACKED
            sides = side_ptr + row[:, None] * most + word
            tl.store(sides, packed, mask=is_there[:, None] & (word < most))
    of_blocked = (sequence * blocked_n)[:, None] + frame * blocked_t + column[None, :]
    blocked = tl.load(blocked_ptr + of_blocked, mask=in_tile, other=1)
    score = tl.where(blocked != 0, BLOCKED_SCORE, score)
    score = tl.where(inside[None, :], score, float("-inf"))
    exponential = tl.exp(score - tl.max(score, axis=1)[:, None])
    weight = exponential * (1.0 / tl.sum(exponential, axis=1))[:, None]
    tl.store(weights_ptr + own, weight.to(weights_ptr.dtype.element_ty), mask=in_tile)


@kernel("sequences", "heads", "frames")
def _backward_kernel(
    weights_ptr,
    first_ptr,
    one_ptr,
    other_ptr,
    words_ptr,
    blocked_ptr,
    of_scores_ptr,
    of_query_ptr,
    sizes_ptr,
    sequences,
    heads,
    frames,
    seen,
    blocked_n,
    blocked_t,
    WIDTH: tl.constexpr,
    HAS_SIZES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    head, frame, sequence, column, is_there, inside, in_tile = _own_rows(
        sequences, heads, frames, seen, BLOCK_N, BLOCK_S
    )
    row = (sequence * heads + head) * frames + frame
    own = row[:, None] * seen + column[None, :]
    weight = tl.load(weights_ptr + own, mask=in_tile, other=0.0).to(tl.float32)
    grad = tl.load(one_ptr + own, mask=in_tile, other=0.0).to(tl.float32)
    grad += tl.load(other_ptr + own, mask=in_tile, other=0.0).to(tl.float32)
    of_first = first_ptr + ((sequence * frames + frame) * seen)[:, None] + column[None, :]
    grad += tl.load(of_first, mask=in_tile & (head == 0), other=0.0).to(tl.float32)
    of_blocked = (sequence * blocked_n)[:, None] + frame * blocked_t + column[None, :]
    blocked = tl.load(blocked_ptr + of_blocked, mask=in_tile, other=1)
    through = weight * (grad - tl.sum(weight * grad, axis=1)[:, None])
    through = tl.where(blocked != 0, 0.0, through).to(of_scores_ptr.dtype.element_ty)
    tl.store(of_scores_ptr + own, through, mask=in_tile)
    if HAS_SIZES:
        tl.store(sizes_ptr + row, tl.sum(tl.abs(through.to(tl.float32)), axis=1), mask=is_there)
    if WIDTH > 0:
        store_of_query(
            of_query_ptr + ((sequence * frames + frame) * heads + head) * WIDTH,
            is_there,
            words_ptr,
            through,
            head,
            frame,
            frames,
            seen,
            column,
            inside,
            WIDTH,
        )


@kernel("rows", "frames", "heads")
def _penalty_kernel(
    side_ptr,
    switch_ptr,
    total_size_ptr,
    words_ptr,
    of_scores_ptr,
    of_query_ptr,
    rows,
    heads,
    frames,
    seen,
    WIDTH: tl.constexpr,
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
            # Two conditions, as WIDTH is a constant.
            if WIDTH > 0:  # noqa: SIM102
                if row < rows:
                    pair, frame = row // frames, row % frames
                    head = pair % heads
                    of_query = of_query_ptr + (pair // heads * frames + frame) * heads * WIDTH
                    store_of_query(
                        of_query + head * WIDTH + tl.arange(0, 1),
                        True,
                        words_ptr,
                        through[None, :],
                        head,
                        frame,
                        frames,
                        seen,
                        column,
                        inside,
                        WIDTH,
                    )


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
    positions: Positions | None,
    blocked: Tensor,
    *,
    blocked_score: float,
    penalty: Penalty | None = None,
    score_limit: float = 0.0,
) -> Tensor:
    """The weights, (N, H, T, S), in the dtype of the scores; float32 inside.

    Args:
        scores_NHTS: contiguous.
        blocked: bool (N, 1, 1, S) or (N, 1, T, S), contiguous.
        penalty: fills its `sides`, for scores beyond +-score_limit.
    """
    batch, heads, frames, seen = scores_NHTS.shape
    weights = torch.empty_like(scores_NHTS)
    block_s = column_block(seen)
    block_n = _sequences(block_s, _SEQUENCES)
    query = None if positions is None else as_rows(positions.query_NTC)
    _forward_kernel(
        (divide_up(batch, block_n) * heads * frames,),
        scores_NHTS,
        None if query is None else query.tensor,
        None if positions is None else positions.words_HGR,
        blocked.view(torch.uint8),
        None if penalty is None else penalty.switch,
        weights,
        None if penalty is None else penalty.sides,
        batch,
        heads,
        frames,
        seen,
        0 if query is None else query.stride,
        *_blocked_strides(blocked),
        blocked_score,
        score_limit,
        0 if positions is None else positions.width,
        penalty is not None,
        _PACKED,
        block_n,
        block_s,
        num_warps=_warps(block_n * block_s),
    )
    return weights


class SoftmaxGradients(NamedTuple):
    """Gradients of the arguments of `masked_softmax`."""

    scores_NHTS: Tensor
    query_NTC: Tensor | None
    positions_HPR: Tensor | None


class WeightsGradients(NamedTuple):
    """Gradients of what reads the weights, all contiguous: of the weights of the first head,
    (N, T, S), and two of all weights, (N, H, T, S)."""

    first_NTS: Tensor
    one_NHTS: Tensor
    other_NHTS: Tensor


def masked_softmax_backward(
    weights_NHTS: Tensor,
    positions: Positions | None,
    blocked: Tensor,
    grads: WeightsGradients,
    *,
    penalty: Penalty | None = None,
    positions_dtype: torch.dtype | None = None,
) -> SoftmaxGradients:
    """Gradients of the scores, and of the queries and positions if there are any.

    Args:
        weights_NHTS: the result, contiguous.
        positions, blocked, penalty: as for `masked_softmax`.
        grads: of the weights, which are added here; autograd would add them in four passes.
        positions_dtype: of the gradient of the positions; None: it is not needed.
    """
    batch, heads, frames, seen = weights_NHTS.shape
    of_scores = torch.empty_like(weights_NHTS)
    width, words, of_query = 0, None, None
    if positions is not None:
        width, words = positions.width, positions.words_HGR
        of_query = positions.query_NTC.new_empty(positions.query_NTC.shape)
    rows = batch * heads * frames
    sizes = None
    if penalty is not None:
        sizes = weights_NHTS.new_empty((rows,), dtype=torch.float32)
    block_s = column_block(seen)
    block_n = _sequences(block_s, _SEQUENCES_BACKWARD)
    _backward_kernel(
        (divide_up(batch, block_n) * heads * frames,),
        weights_NHTS,
        *grads,
        words,
        blocked.view(torch.uint8),
        of_scores,
        of_query,
        sizes,
        batch,
        heads,
        frames,
        seen,
        *_blocked_strides(blocked),
        width,
        sizes is not None,
        block_n,
        block_s,
        num_warps=_warps(block_n * block_s),
    )
    if penalty is not None and sizes is not None:
        _penalty_kernel(
            (divide_up(rows, _ROWS),),
            penalty.sides,
            penalty.switch,
            sizes.sum(),
            words,
            of_scores,
            of_query,
            rows,
            heads,
            frames,
            seen,
            width,
            _ROWS,
            _PACKED,
            block_s,
            num_warps=_warps(block_s),
        )
    of_positions = None
    if positions is not None and positions_dtype is not None:
        of_positions = positions_gradient(of_scores, positions, positions_dtype)
    return SoftmaxGradients(of_scores, of_query, of_positions)


def _blocked_strides(blocked: Tensor) -> tuple[int, int]:
    """Elements between sequences and between frames; 0 along an axis of one element."""
    sequences, frames = (blocked.stride(axis) if blocked.size(axis) > 1 else 0 for axis in (0, 2))
    return sequences, frames


def _sequences(columns: int, most: int) -> int:
    """Sequences of a program: one if a row alone needs the registers."""
    return most if columns <= _FEW_COLUMNS else 1


def _warps(elements: int) -> int:
    """Warps of a program: 32 elements for each thread."""
    return max(min(elements // 1024, 8), 1)
