"""Joiner and loss in one: the logits of all nodes are never stored together.

logits(row) = act(am(n,t) + lm(n,u)) weight^T + bias. Rows are divided into chunks.
The hidden rows and logits of one chunk are in a reused workspace, and log_probs keeps three numbers
a row. The forward pass ends with the chunk of the first rows, and the backward pass begins with it,
while it is in the workspace; it computes the others again, turns the logits into gradients in place
and sums the gradients of weight, bias, am and lm.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.autograd import refuses_second_derivative
from pruned_rnnt.ops.common.counted_rows import can_count_rows
from pruned_rnnt.ops.common.library import accumulator
from pruned_rnnt.ops.common.matrix_products import product_dtype
from pruned_rnnt.ops.common.opaque import opaque_to_compile
from pruned_rnnt.ops.common.utterances import PackedRows, Utterances
from pruned_rnnt.ops.joiner.active_joiner import (
    FEWEST_ROWS,
    ActiveLoss,
    ActivePlan,
    chunk_bytes,
    uses_active_rows,
)
from pruned_rnnt.ops.joiner.fused_log_probs import (
    DurationRows,
    JoinerGradients,
    JoinerInputs,
    JoinerPlan,
    Workspace,
    fused_log_probs,
    fused_log_probs_backward,
)
from pruned_rnnt.ops.joiner.log_probs import RowLogProbs, RowStatistics
from pruned_rnnt.ops.joiner.output_layer import padded_output, padded_width
from pruned_rnnt.ops.joiner.packed_log_probs import fitting_splits
from pruned_rnnt.ops.joiner.row_loss import LossOptions, run_recursion

# The most that the hidden rows and logits of a chunk may take. Each chunk reads and writes the sum
# of the weight's gradient: where that is large, a chunk is as large as both together. Before a
# backward pass over active rows, no more than its own chunks take (active_joiner.py).
WORKSPACE_BYTES = 224 << 20
_LARGE_GRADIENT_BYTES = 64 << 20
# The most that the gradient of hidden rows may take, which is computed piece by piece of a chunk.
_GRADIENT_BYTES = 24 << 20


def _workspace(inputs: JoinerInputs, plan: JoinerPlan) -> Workspace:
    am, weight, rows = inputs.am, inputs.weight, plan.largest
    return Workspace(am.new_empty((rows, am.shape[2])), am.new_empty((rows, weight.shape[0])))


def scored_rows(ctx: Any, inputs: JoinerInputs, duration_logits: Tensor | None) -> RowLogProbs:
    """px, py and lse (R) acc; also fills duration_logits (R,K) acc. ctx has the plan, and keeps the
    workspace for input_gradients."""
    plan, workspace = ctx.plan, _workspace(inputs, ctx.plan)
    acc = accumulator(inputs.am.dtype)
    scores = RowLogProbs(*inputs.am.new_empty((3, plan.rows), dtype=acc).unbind(0))
    fused_log_probs(inputs, *plan, workspace, scores, duration_logits)
    ctx.workspace = None if torch.compiler.is_compiling() else workspace
    return scores


def input_gradients(
    ctx: Any,
    grad_loss: Tensor,
    inputs: JoinerInputs,
    statistics: RowStatistics,
    durations: DurationRows,
) -> list[Tensor | None]:
    """The gradients of am, lm, weight and bias, in their dtype; None for a weight or bias that is
    frozen. ctx has the plan, and the workspace with a chunk, which the first pass takes; a second
    one, with retain_graph, computes it anew."""
    plan: JoinerPlan = ctx.plan
    kept, ctx.workspace = ctx.workspace, None
    acc = statistics.lse.dtype
    of_layer = [
        torch.empty_like(x, dtype=acc) if wanted else None
        for x, wanted in zip((inputs.weight, inputs.bias), ctx.needs_input_grad[2:4], strict=True)
    ]
    grad_lm = torch.empty_like(inputs.lm, dtype=acc)
    grads = JoinerGradients(torch.empty_like(inputs.am), grad_lm, *of_layer)
    workspace = _workspace(inputs, plan) if kept is None else kept
    given = (grad_loss.to(acc).contiguous(), inputs, *plan, statistics, durations)
    fused_log_probs_backward(*given, kept is not None, workspace, grads)
    return [grad if grad is None else grad.to(inputs.am.dtype) for grad in grads]


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, ctx.plan = arguments
        inputs, plan = JoinerInputs(*tensors), ctx.plan
        px, py, lse = scored_rows(ctx, inputs, None)
        total, gx, gy = run_recursion(px, py, plan.lattice_rows(inputs), plan.options)
        ctx.save_for_backward(*tensors, lse, gx, gy)
        return -total

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, lse, gx, gy = ctx.saved_tensors
        statistics, durations = RowStatistics(lse, gx, gy), DurationRows(None, None)
        inputs = JoinerInputs(*tensors)
        return *input_gradients(ctx, grad_loss, inputs, statistics, durations), *[None] * 6


def row_chunks(
    rows: int,
    columns: int,
    *,
    logit_bytes: int,
    hidden_bytes: int,
    gradient_bytes: int = 0,
    packed: PackedRows | None = None,
    rows_on_device: bool = False,
    workspace_bytes: int | None = None,
) -> tuple[list[int], int]:
    """chunk_offsets and hidden_rows of a JoinerPlan, by the bytes of a row of logits and of hidden.

    gradient_bytes: of the sum of the weight's gradient.
    packed: only of a packed whole lattice, whose frames differ in their number of rows.
    rows_on_device: only the device knows how many rows there are, at most `rows`.
    workspace_bytes: the most that a chunk may take; default WORKSPACE_BYTES.
    """
    row_bytes = logit_bytes + hidden_bytes
    most_bytes = workspace_bytes or WORKSPACE_BYTES
    if gradient_bytes > _LARGE_GRADIENT_BYTES:
        most_bytes = max(most_bytes, 2 * gradient_bytes)
    if rows_on_device:
        return chunk_offsets(rows, 1, row_bytes, most_bytes), rows
    if packed is None:
        offsets = chunk_offsets(rows, columns, row_bytes, most_bytes)
        hidden_rows = max(1, _GRADIENT_BYTES // (hidden_bytes * columns)) * columns
    else:
        offsets = ragged_chunk_offsets(packed, row_bytes, most_bytes)
        hidden_rows = rows
    return offsets, hidden_rows


def chunk_offsets(rows: int, frame_rows: int, row_bytes: int, most_bytes: int) -> list[int]:
    """The rows at which even chunks of at most most_bytes begin, and the end; frame_rows rows
    a frame."""
    frames = rows // frame_rows
    most = max(1, most_bytes // (row_bytes * frame_rows))
    each = -(-frames // -(-frames // most))
    return [*range(0, rows, each * frame_rows), rows]


def ragged_chunk_offsets(packed: PackedRows, row_bytes: int, most_bytes: int) -> list[int]:
    """The same for packed rows whose frames differ in their number of rows."""
    splits, widths = packed
    limit, rows = max(1, most_bytes // row_bytes), splits[-1]
    offsets, begin = [0], 0
    while begin < rows:
        last = min(begin + limit, rows)
        n = bisect_left(splits, last) - 1
        end = last - (last - splits[n]) % widths[n]
        # A frame may have more rows than the limit.
        begin = end if end > begin else begin + widths[n]
        offsets.append(begin)
    return offsets


class PlannedJoiner(NamedTuple):
    """The arguments of joiner_loss. active: None if the backward pass computes all rows; otherwise
    weight and bias are those of ActiveLoss."""

    inputs: JoinerInputs
    plan: JoinerPlan
    active: ActivePlan | None


@opaque_to_compile
def joiner_loss(inputs: JoinerInputs, plan: JoinerPlan, active: ActivePlan | None = None) -> Tensor:
    """Loss (N,) acc, differentiable in am, lm, weight and bias."""
    arguments = (plan,) if active is None else (plan, active)
    function = _FusedLoss if active is None else ActiveLoss
    loss: Tensor = function.apply(*inputs, *arguments)  # type: ignore[no-untyped-call]
    return loss


def planned_joiner(
    am: Tensor,
    lm: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    utterances: Utterances,
    *,
    start: Tensor | None,
    columns: int,
    vocabulary: int,
    activation: int,
    options: LossOptions,
    skips_rows: bool = False,
) -> PlannedJoiner:
    """The arguments of joiner_loss, for am (N,T,D), lm (N,U+1,D), weight (V,D) and bias (V). Rows
    of weight and bias behind the vocabulary are those of durations; start (N,T): of a band of that
    many columns, None for the whole lattice.

    Rows are packed where the host knows the lengths, because then their number is known without
    waiting, and where the products can take it from the device; else padded.

    skips_rows: the backward pass may leave out rows with next to no occupancy (active_rows.py), and
    takes the number of rows from the device; not for durations.
    """
    dtype = product_dtype(am, lm, weight)
    batch, frames, hidden = am.shape
    am, lm = am.to(dtype).contiguous(), lm.to(dtype).contiguous()
    width = padded_width(weight.shape[0])
    packed, splits, rows = None, None, batch * frames * columns
    if utterances.host_lengths is not None:
        packed = utterances.host_lengths.packed_rows(None if start is None else columns)
        utterances, splits = utterances.on_device_with(packed.row_splits)
        rows = packed.row_splits[-1]
    gradient_bytes = width * hidden * accumulator(dtype).itemsize
    can_skip = skips_rows and start is None and gradient_bytes <= _LARGE_GRADIENT_BYTES
    is_active = can_skip and uses_active_rows(am, rows)
    is_counted = can_skip and not is_active and counts_rows(am, rows)
    rows_on_device = packed is None and (is_active or is_counted)
    if rows_on_device:
        _, *lengths_N = utterances.tensors
        splits = torch.empty(batch + 1, dtype=torch.int64, device=am.device)
        fitting_splits(*lengths_N, frames, columns, splits)
    chunks = row_chunks(
        rows,
        columns,
        logit_bytes=width * dtype.itemsize,
        hidden_bytes=hidden * dtype.itemsize,
        gradient_bytes=gradient_bytes,
        packed=packed if start is None else None,
        rows_on_device=rows_on_device,
        workspace_bytes=chunk_bytes(rows_on_device) if is_active else None,
    )
    plan = JoinerPlan(frames, columns, *chunks, is_counted, vocabulary, activation, options)
    active = None
    if is_active:
        active = ActivePlan.of(plan, hidden, width, rows_on_device)
        bias = weight.new_zeros(weight.shape[0]) if bias is None else bias
    else:
        weight, bias = padded_output(weight, bias, dtype)
    inputs = JoinerInputs(am, lm, weight, bias, *utterances.tensors, start, splits)
    return PlannedJoiner(inputs, plan, active)


def counts_rows(am: Tensor, rows: int) -> bool:
    """True if the loss of a whole lattice with room for that many rows packs them on the device and
    computes those that exist; am is in the dtype of the products."""
    return rows >= FEWEST_ROWS and not torch.compiler.is_compiling() and can_count_rows(am)
