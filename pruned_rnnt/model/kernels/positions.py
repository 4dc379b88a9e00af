"""Scores by relative position in attention, as the kernels over rows of scores compute them.

    by_position[t, s] = sum_p query[t, p] positions[p, T - t + s]

Axes: N sequences, H heads, T frames, S frames attended to, P position width of a head, R = S + T
distances.

    positions          | . . . . . . . . . . . . |    R columns
                              |<----- S ----->|       of which row t reads S from T - t on

P is so small (4) that products with the positions take less time than reading them would, had a
matrix product written them: R columns for each row t, twice as much as the scores. A program takes
one row t of many sequences, which all read the same positions.

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

# ruff: noqa: RUF005  Triton has no starred expressions.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import divide_up, kernel, power_of_two
from pruned_rnnt.model.kernels.rows import as_rows, sums_of_parts

# Frames and distances of a tile for the gradient of the positions, and programs that share it.
_FRAMES, _DISTANCES, _PROGRAMS = 32, 64, 1056


@triton.jit
def positions_of_row(positions_ptr, head, frame, frames, seen, column, inside, WIDTH: tl.constexpr):
    """The positions that a frame reads: for each p, (S,) in float32."""
    found = ()
    for p in tl.static_range(WIDTH):
        first = (head * WIDTH + p) * (seen + frames) + frames - frame
        place = positions_ptr + first + column
        found = found + (tl.load(place, mask=inside, other=0.0).to(tl.float32),)
    return found


@triton.jit
def _add_four(x0, x1, x2, x3, y0, y1, y2, y3):
    return x0 + y0, x1 + y1, x2 + y2, x3 + y3


@triton.jit
def store_of_query(of_query_ptr, positions, through, WIDTH: tl.constexpr):
    """Store the gradient of one row's query, from that of its scores."""
    through = through.to(tl.float32)
    for first in tl.static_range(0, WIDTH, 4):
        # Sums by one reduction, since each waits for all warps.
        sums = tl.reduce(
            (
                through * positions[first],
                through * positions[min(first + 1, WIDTH - 1)],
                through * positions[min(first + 2, WIDTH - 1)],
                through * positions[min(first + 3, WIDTH - 1)],
            ),
            0,
            _add_four,
        )
        for index in tl.static_range(min(WIDTH - first, 4)):
            place = of_query_ptr + first + index
            tl.store(place, sums[index].to(of_query_ptr.dtype.element_ty))


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
    positions_HPR: the same dtype, contiguous.
    """

    query_NTC: Tensor
    positions_HPR: Tensor

    @property
    def width(self) -> int:
        """P."""
        return self.positions_HPR.size(1)


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
