"""Scores by relative position in attention, as the kernels over rows of scores compute them.

    by_position[t, s] = sum_p query[t, p] positions[p, T - t + s]

Axes: N sequences, H heads, T frames, S frames attended to, P position width of a head, R = S + T
distances, G words.

    positions          | . . . . . . . . . . . . |    R columns
                              |<----- S ----->|       of which row t reads S from T - t on

P is so small (4) that products with the positions take less time than reading them would, had a
matrix product written them: R columns for each row t, twice as much as the scores. A program takes
one row t of several sequences, which all read the same positions. Rows begin anywhere, so that two
bytes would be read at a time; words of eight bytes hold several p of one column.

Backward, with g the gradient of the scores, the kernel over rows also computes the gradient of the
row's query. A kernel of this module adds up along the diagonals of g for the positions. Its
programs take BLOCK_R distances of one head:

    of_query[t, p] = sum_s g[t, s] positions[p, T - t + s]
    of_positions[p, r] = sum_t query[t, p] g[t, r - T + t]

          s ->                     r ->
    t   | 0 1 2 3 4 |        t   | . . . . 0 1 2 3 4 . |    a tile: BLOCK_T rows of g, each read one
    |   | 0 1 2 3 4 |        |   | . . . 0 1 2 3 4 . . |    column further to the left, which a
    v   | 0 1 2 3 4 |        v   | . . 0 1 2 3 4 . . . |    product with the queries adds up
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from pruned_rnnt.model.kernels.launch import divide_up, kernel, power_of_two
from pruned_rnnt.model.kernels.rows import as_rows, sums_of_parts

# Frames and distances of a tile for the gradient of the positions, and programs that share it.
_FRAMES, _DISTANCES, _PROGRAMS = 32, 64, 1056


@triton.jit
def words_of_row(words_ptr, group, head, frame, frames, seen, column, inside, GROUPS: tl.constexpr):
    """The words of a group of p, for the columns that a frame reads, (S,)."""
    first = (head * GROUPS + group) * (seen + frames) + frames - frame
    return tl.load(words_ptr + first + column, mask=inside, other=0)


@triton.jit
def position_of(words, index: tl.constexpr, dtype: tl.constexpr):
    """Number `index` of each word, (1, S) in float32, for several rows.

    By halves of words: shifts of 64 bits, and conversions of bfloat16, take several instructions.
    """
    each: tl.constexpr = 64 // dtype.primitive_bitwidth
    half = (words >> 32).to(tl.int32) if index >= each // 2 else words.to(tl.int32)
    if dtype == tl.float32:
        return half.to(tl.float32, bitcast=True)[None, :]
    elif dtype == tl.bfloat16:  # noqa: RET505  Triton compiles what follows a return
        if index % 2 == 0:
            return (half << 16).to(tl.float32, bitcast=True)[None, :]
        else:  # noqa: RET505
            return (half & -65536).to(tl.float32, bitcast=True)[None, :]
    else:
        number = half if index % 2 == 0 else half >> 16
        return number.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)[None, :]


@triton.jit
def _add_two(x0, x1, y0, y1):
    return x0 + y0, x1 + y1


@triton.jit
def _add_four(x0, x1, x2, x3, y0, y1, y2, y3):
    return x0 + y0, x1 + y1, x2 + y2, x3 + y3


@triton.jit
def store_of_query(
    of_query_ptrs,
    is_there,
    words_ptr,
    through,
    head,
    frame,
    frames,
    seen,
    column,
    inside,
    WIDTH: tl.constexpr,
):
    """Store the gradients of the queries of some rows (N,), from those of their scores (N, S)."""
    dtype: tl.constexpr = of_query_ptrs.dtype.element_ty
    each: tl.constexpr = 64 // dtype.primitive_bitwidth
    groups: tl.constexpr = (WIDTH + each - 1) // each
    through = through.to(tl.float32)
    for group in tl.static_range(groups):
        words = words_of_row(words_ptr, group, head, frame, frames, seen, column, inside, groups)
        product_0 = through * position_of(words, 0, dtype)
        product_1 = through * position_of(words, 1, dtype)
        # Sums by one reduction, since each waits for all warps.
        if each == 4:
            product_2 = through * position_of(words, 2, dtype)
            product_3 = through * position_of(words, 3, dtype)
            sums = tl.reduce((product_0, product_1, product_2, product_3), 1, _add_four)
        else:
            sums = tl.reduce((product_0, product_1), 1, _add_two)
        for index in tl.static_range(each):
            if group * each + index < WIDTH:
                place = of_query_ptrs + group * each + index
                tl.store(place, sums[index].to(dtype), mask=is_there)


@kernel("sequences", "heads", "frames", "turns")
def _of_positions_kernel(
    of_scores_ptr,
    query_ptr,
    parts_ptr,
    sequences,
    heads,
    frames,
    seen,
    query_stride,
    turns,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """A program takes every num_programs(1)-th sequence."""
    distances = seen + frames
    blocks = tl.cdiv(distances, BLOCK_R)
    head = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * BLOCK_R
    distance = first + tl.arange(0, BLOCK_R)
    part = tl.arange(0, BLOCK_P)
    total = tl.zeros((BLOCK_P, BLOCK_R), dtype=tl.float32)
    # Other rows have none of these distances.
    begin = tl.maximum(frames - first - BLOCK_R + 1, 0)
    end = tl.minimum(distances - first, frames)
    for turn in range(turns):
        sequence = (turn * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
        is_there = sequence < sequences
        scores = of_scores_ptr + (sequence * heads + head) * frames * seen
        query = query_ptr + sequence * frames * query_stride + head * WIDTH
        for start in range(begin, end, BLOCK_T):
            frame = start + tl.arange(0, BLOCK_T)
            column = distance[None, :] - frames + frame[:, None]
            inside = is_there & (frame < end)[:, None] & (column >= 0) & (column < seen)
            row = frame.to(tl.int64)
            through = tl.load(scores + row[:, None] * seen + column, mask=inside, other=0.0)
            own = tl.load(
                query + row[None, :] * query_stride + part[:, None],
                mask=is_there & (frame < end)[None, :] & (part < WIDTH)[:, None],
                other=0.0,
            )
            total = tl.dot(own, through, total, input_precision="ieee")
    out = parts_ptr + (tl.program_id(1) * distances + distance[None, :]) * heads * WIDTH
    out += head * WIDTH + part[:, None]
    tl.store(out, total, mask=(distance < distances)[None, :] & (part < WIDTH)[:, None])


class Positions(NamedTuple):
    """Scores by position, added to others.

    query_NTC: (N, T, H * P), of the dtype of the scores.
    words_HGR: int64, of `packed_positions`.
    """

    query_NTC: Tensor
    words_HGR: Tensor

    @property
    def width(self) -> int:
        """P."""
        return self.query_NTC.size(-1) // self.words_HGR.size(0)


def packed_positions(positions_HPR: Tensor) -> Tensor:
    """The positions (H, P, R) as words (H, G, R), int64: four p of 16 bits each, or two of 32."""
    each = 8 // positions_HPR.element_size()
    if lacking := -positions_HPR.size(1) % each:
        positions_HPR = functional.pad(positions_HPR, (0, 0, 0, lacking))
    words_HGR4 = positions_HPR.unflatten(1, (-1, each)).movedim(2, -1).contiguous()
    words_HGR: Tensor = words_HGR4.view(torch.int64).squeeze(-1)
    return words_HGR


def positions_gradient(of_scores_NHTS: Tensor, positions: Positions, dtype: torch.dtype) -> Tensor:
    """The gradient (H, P, R) of the positions, summed in float32."""
    batch, heads, frames, seen = of_scores_NHTS.shape
    width, distances = positions.width, seen + frames
    query = as_rows(positions.query_NTC)
    blocks = heads * divide_up(distances, _DISTANCES)
    parts = min(batch, max(_PROGRAMS // blocks, 1))
    of_parts = of_scores_NHTS.new_empty((parts, distances, heads * width), dtype=torch.float32)
    _of_positions_kernel(
        (blocks, parts),
        of_scores_NHTS,
        query.tensor,
        of_parts,
        batch,
        heads,
        frames,
        seen,
        query.stride,
        divide_up(batch, parts),
        width,
        max(power_of_two(width), 16),
        _FRAMES,
        _DISTANCES,
    )
    of_positions_RC = sums_of_parts(of_parts.flatten(1), dtype).view(distances, -1)
    of_positions_HPR: Tensor = of_positions_RC.unflatten(1, (heads, width)).permute(1, 2, 0)
    return of_positions_HPR
