"""The backward pass of the exact loss over its active rows: those whose occupancy matters.

Most nodes of a lattice have next to no occupancy, (1 + fastemit_lambda) gx + gy, because no likely
path visits them, and their share of every gradient is proportional to it. Every path leaves each
frame and each symbol position once, so that the occupancies by which paths leave one sum to 1. Of
these, the rows left out have at most DROPPED_OCCUPANCY = 2^-11: a quarter of a unit in the last
place of bfloat16, in which the gradients of logits are. Where a model is so sure of an utterance
that its loss is below 8 DROPPED_OCCUPANCY a frame, the gradient of all rows is that small, and the
rows left out have at most an eighth of the loss of a frame, or 2^-17. Each frame and each position
has a limit, the largest DROPPED_OCCUPANCY 2^-i for which all its rows up to the limit have no more
than that together; a row is active if its occupancy exceeds one of its two limits.

How many rows are active is known to the device only. They are listed in order and divided into
chunks, of whole frames, that begin near multiples of a fixed number of rows; there are as many
chunks as all rows would need, and those at the end are empty. Nothing waits for the device.

    row of the lattice      0  1  2  3  4  5  6  7  8  9        a frame has 5 rows
    active                  .  x  x  .  .  .  .  x  x  x
    places (rows before)    0  0  1  2  2  2  2  2  3  4  5
    listed                  1  2  7  8  9                       place 2 is row 7
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pruned_rnnt.ops.common.library import Out, new_outputs, op
from pruned_rnnt.ops.common.row_geometry import LatticeRows, Nodes
from pruned_rnnt.ops.joiner.joiner_rows import activated, add_gradients
from pruned_rnnt.ops.joiner.log_probs import RowStatistics, unit_gradient
from pruned_rnnt.ops.lattice.recursion import GradientOptions

# The most that the rows left out have of the occupancy of a frame or a symbol position.
DROPPED_OCCUPANCY = 2.0**-11
# Of an utterance's loss for each of its frames, the share that may be left out, and the share of
# left_out that always may.
_OF_LOSS, _ALWAYS = 2.0**-3, 2.0**-6
# Limits to choose from.
_LIMITS = 16
# Rows that a block of the kernel lists (csrc/cuda/whole_lattice/active_ops.cuh).
ROWS_OF_BLOCK = 4096


class ActiveRows(NamedTuple):
    """Active rows of R, in K chunks.

    listed (R) int32: the active rows, in order; arbitrary behind them. places (R+1) int32: active
    rows before each row. begins (K+1) int32: the place at which each chunk begins, and the end.
    chunk_utterances, chunk_frames (K+1) int32: of the row at that place; (N, 0) at the end.
    """

    listed: Tensor
    places: Tensor
    begins: Tensor
    chunk_utterances: Tensor
    chunk_frames: Tensor


@op
def list_active_rows(
    gx: Tensor,
    gy: Tensor,
    total: Tensor,
    rows: LatticeRows,
    fastemit_lambda: float,
    left_out: float,
    chunk_rows: int,
    limits: Out[Tensor],
    found: Out[Tensor],
    active: Out[ActiveRows],
    block_ends: Out[Tensor],
) -> None:
    """gx, gy (R) and total (N), log P, float32 of a whole lattice -> its active rows, without which
    each frame and each position loses at most left_out (DROPPED_OCCUPANCY above), in K chunks;
    block_ends (K,G) int32: where G even blocks of the rows of each chunk end. Workspace: limits
    (N,T+S) float32, found (ceil(R / ROWS_OF_BLOCK), ROWS_OF_BLOCK / 32 + 1) int32."""
    count, device = gx.shape[0], gx.device
    n, t, u, valid = rows.nodes(0, count)
    n, t, u = (x[valid] for x in (n, t, u))
    occupancy = torch.add(gy, gx, alpha=1 + fastemit_lambda)
    shape = (rows.logit_lengths.shape[0], rows.frames, rows.columns)
    occupancy_NTS = occupancy.new_zeros(shape).index_put_((n, t, u), occupancy[valid])
    most_N = (total * (-_OF_LOSS / rows.logit_lengths)).clamp(_ALWAYS * left_out, left_out)
    most_N11 = most_N.to(occupancy)[:, None, None]
    limits_NT1, limits_N1S = (_limits(occupancy_NTS, left_out, most_N11, dim) for dim in (2, 1))
    is_active = torch.zeros_like(valid)
    is_active[valid] = (occupancy_NTS > torch.minimum(limits_NT1, limits_N1S))[n, t, u]
    active.places[0] = 0
    torch.cumsum(is_active, 0, dtype=torch.int32, out=active.places[1:])
    total, listed = active.places[-1], is_active.nonzero()[:, 0]
    active.listed[: len(listed)] = listed
    chunks, blocks = block_ends.shape
    wanted = torch.arange(chunks + 1, device=device) * chunk_rows
    at = pad(listed, (0, 1))[wanted.clamp(max=len(listed))]
    nodes = rows.nodes_of(at)
    is_end = wanted >= total
    # Of a whole lattice, at - u is the first row of the frame.
    active.begins.copy_(torch.where(is_end, total, active.places[at - nodes.u]))
    active.chunk_utterances.copy_(torch.where(is_end, rows.logit_lengths.shape[0], nodes.n))
    active.chunk_frames.copy_(torch.where(is_end, 0, nodes.t))
    parts = torch.arange(1, blocks + 1, device=device)
    block_ends.copy_(active.begins.diff().long()[:, None] * parts // blocks)


def _limits(occupancy_NTS: Tensor, left_out: float, most_N11: Tensor, dim: int) -> Tensor:
    """Of each frame (dim 2) or position (dim 1), whose rows up to the limit have at most `most`
    together; that dimension becomes 1."""
    least = most_N11 / max(occupancy_NTS.shape[1:])
    limits = least.expand_as(occupancy_NTS.sum(dim, keepdim=True))
    # The sums grow with the limit: the last that fits is the largest.
    for i in reversed(range(_LIMITS)):
        limit = least.clamp_min(left_out * 2.0**-i)
        lost = occupancy_NTS.masked_fill(occupancy_NTS > limit, 0).sum(dim, keepdim=True)
        limits = torch.where(lost <= most_N11, limit, limits)
    return limits


def active_rows(
    statistics: RowStatistics,
    total: Tensor,
    rows: LatticeRows,
    fastemit_lambda: float,
    left_out: float,
    chunk_rows: int,
    blocks: int,
) -> tuple[ActiveRows, Tensor]:
    """The active rows of list_active_rows in chunks of at most chunk_rows + S - 1 rows, and
    block_ends (K,blocks)."""
    count = statistics.gx.shape[0]
    chunks = -(-count // chunk_rows)

    def numbers(*shape: int) -> Tensor:
        return statistics.gx.new_empty(shape, dtype=torch.int32)

    of_chunks = new_outputs(3, statistics.gx, (chunks + 1,), torch.int32)
    active = ActiveRows(numbers(count), numbers(count + 1), *of_chunks)
    block_ends = numbers(chunks, blocks)
    list_active_rows(
        statistics.gx,
        statistics.gy,
        total,
        rows,
        fastemit_lambda,
        left_out,
        chunk_rows,
        statistics.gx.new_empty(rows.logit_lengths.shape[0], rows.frames + rows.columns),
        numbers(-(-count // ROWS_OF_BLOCK), ROWS_OF_BLOCK // 32 + 1),
        active,
        block_ends,
    )
    return active, block_ends


def _chunk(rows: LatticeRows, active: ActiveRows, chunk: int) -> tuple[int, Tensor, Nodes]:
    """Number of the chunk's rows, the rows, and their nodes; waits for the device."""
    begin, end = active.begins[chunk : chunk + 2].tolist()
    listed = active.listed[begin:end].long()
    return end - begin, listed, rows.nodes_of(listed)


@op
def active_joiner_rows(
    am: Tensor,
    lm: Tensor,
    rows: LatticeRows,
    active: ActiveRows,
    chunk: int,
    activation: int,
    hidden: Out[Tensor],
) -> None:
    """am (N,T,D), lm (N,U+1,D) -> hidden (C,D') with D' > D, all of one dtype, for the rows of the
    chunk: act(am(n,t) + lm(n,u)), then 1, the factor of the output layer's bias, and zeros. Rows
    behind the chunk keep what they have."""
    count, _, (n, t, u, _) = _chunk(rows, active, chunk)
    width = am.shape[2]
    hidden[:count, :width] = activated(am[n, t] + lm[n, u], activation)
    hidden[:count, width] = 1
    hidden[:count, width + 1 :] = 0


@op
def active_log_probs_backward(
    grad_loss: Tensor,
    statistics: RowStatistics,
    targets: Tensor,
    rows: LatticeRows,
    active: ActiveRows,
    chunk: int,
    vocabulary: int,
    options: GradientOptions,
    logits: Out[Tensor],
    sums: Out[Tensor],
) -> None:
    """log_probs_backward for the rows of the chunk: the gradient replaces logits (C,V'), of whose
    columns those from `vocabulary` on are written 0. Rows behind the chunk keep what they have.
    sums (P,V') acc: the gradients of P parts of the rows are added to a row of it each."""
    count, listed, nodes = _chunk(rows, active, chunk)
    y = rows.symbols_after(nodes, targets, vocabulary, options.blank)
    here = RowStatistics(*(x[listed] for x in statistics))
    z = logits[:count, :vocabulary]
    unit = unit_gradient(z, here, y, options)
    logits[:count, :vocabulary] = unit * grad_loss[nodes.n][:, None]
    logits[:count, vocabulary:] = 0
    sums[0] += logits[:count].sum(0, dtype=sums.dtype)


@op
def active_joiner_rows_backward(
    grad_hidden: Tensor,
    hidden: Tensor,
    rows: LatticeRows,
    active: ActiveRows,
    chunk: int,
    activation: int,
    grad_am: Out[Tensor],
    grad_lm: Out[Tensor],
) -> None:
    """grad_hidden (C,D) and hidden (C,D') of the chunk -> grad_am (N,T,D) of their dtype: frames
    with active rows of this chunk are assigned (summed in acc, rounded once), others not touched;
    grad_lm (N,U+1,D) acc: added to, in a fixed order."""
    count, _, nodes = _chunk(rows, active, chunk)
    value = hidden[:count, : grad_lm.shape[2]]
    add_gradients(grad_hidden[:count], value, nodes, activation, grad_am, grad_lm)
