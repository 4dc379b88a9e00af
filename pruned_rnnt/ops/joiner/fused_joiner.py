"""Joiner and loss in one: the logits of all nodes are never stored together.

logits(row) = act(am(n,t) + lm(n,u)) weight^T + bias. Rows are divided into chunks.
The hidden rows and logits of one chunk are in a reused workspace, and log_probs keeps three numbers
a row. The forward pass ends with the chunk of the first rows, and the backward pass begins with it,
while it is in the workspace; it computes the others again, turns the logits into gradients in place
and sums the gradients of weight, bias, am and lm.

Of TDT, the output layers of tokens and durations are one matrix of V + K rows, so that one product
makes both logits of a chunk. Duration logits are few, and stored for all rows.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.autograd import opaque_to_compile, refuses_second_derivative
from pruned_rnnt.ops.common.library import accumulator, new_outputs
from pruned_rnnt.ops.common.matrix_products import can_count_rows, product_dtype
from pruned_rnnt.ops.common.row_geometry import fitting_splits
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
    aligned,
    fused_log_probs,
    fused_log_probs_backward,
    padded_output,
    padded_width,
)
from pruned_rnnt.ops.joiner.log_probs import RowLogProbs, RowStatistics
from pruned_rnnt.ops.lattice.recursion import Recursion, run_recursion

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


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, ctx.plan, recursion = arguments
        inputs, plan, tdt = JoinerInputs(*tensors), ctx.plan, recursion.tdt
        new, acc = inputs.am.new_empty, accumulator(inputs.am.dtype)
        duration_logits = None if tdt is None else new((plan.rows, len(tdt.durations)), dtype=acc)
        workspace = _workspace(inputs, plan)
        scores = RowLogProbs(*new_outputs(3, inputs.am, (plan.rows,), acc))
        fused_log_probs(inputs, *plan, workspace, scores, duration_logits)
        # Its chunk is for the first backward pass.
        ctx.workspace = None if torch.compiler.is_compiling() else workspace
        px, py, lse = scores
        rows, symbols = plan.lattice_rows(inputs), inputs.targets.shape[1]
        sums = run_recursion(px, py, rows, recursion, duration_logits, symbols=symbols)
        total, gx, gy, *durations = sums
        gd = durations[1] if durations else None
        ctx.save_for_backward(*tensors, lse, gx, gy, duration_logits, gd)
        return -total

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, lse, gx, gy, duration_logits, gd = ctx.saved_tensors
        inputs, plan = JoinerInputs(*tensors), ctx.plan
        # A second pass, with retain_graph, computes the chunk anew.
        kept, ctx.workspace = ctx.workspace, None
        workspace = _workspace(inputs, plan) if kept is None else kept
        of_layer = [
            torch.empty_like(x, dtype=lse.dtype) if wanted else None
            for x, wanted in zip(inputs[2:4], ctx.needs_input_grad[2:4], strict=True)
        ]
        grad_lm = torch.empty_like(inputs.lm, dtype=lse.dtype)
        grads = JoinerGradients(torch.empty_like(inputs.am), grad_lm, *of_layer)
        upstream = grad_loss.to(lse.dtype).contiguous()
        rows = (RowStatistics(lse, gx, gy), DurationRows(duration_logits, gd))
        fused_log_probs_backward(upstream, inputs, *plan, *rows, kept is not None, workspace, grads)
        dtype = inputs.am.dtype
        return *(x if x is None else x.to(dtype) for x in grads), *[None] * 7


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
    if frames <= most:
        return [0, rows]
    each = -(-frames // -(-frames // most))
    # torch.compile keeps sizes dynamic in products, but not in the step of a range.
    return [*(n * each * frame_rows for n in range(-(-frames // each))), rows]


def ragged_chunk_offsets(packed: PackedRows, row_bytes: int, most_bytes: int) -> list[int]:
    """`chunk_offsets` for packed rows, whose frames differ in their number of rows."""
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


class OutputLayers(NamedTuple):
    """weight (V,D) and bias (V) or None of tokens; of TDT also (K,D), and (K) or None, of
    durations."""

    weight: Tensor
    bias: Tensor | None
    duration_weight: Tensor | None = None
    duration_bias: Tensor | None = None

    def joined(self) -> tuple[Tensor, Tensor | None]:
        """weight (V+K,D) and bias (V+K)."""
        if self.duration_weight is None:
            return self.weight, self.bias
        weights = (self.weight, self.duration_weight)
        biases = [
            weight.new_zeros(weight.shape[0]) if bias is None else bias
            for weight, bias in zip(weights, (self.bias, self.duration_bias), strict=True)
        ]
        return torch.cat(weights), torch.cat(biases)


class PlannedJoiner(NamedTuple):
    """The arguments of joiner_loss. active: None if the backward pass computes all rows; otherwise
    weight and bias are those of ActiveLoss."""

    inputs: JoinerInputs
    plan: JoinerPlan
    recursion: Recursion
    active: ActivePlan | None


@opaque_to_compile
def joiner_loss(
    inputs: JoinerInputs, plan: JoinerPlan, recursion: Recursion, active: ActivePlan | None = None
) -> Tensor:
    """Loss (N,) acc, differentiable in am, lm, weight and bias."""
    function, how = (_FusedLoss, recursion) if active is None else (ActiveLoss, active)
    loss: Tensor = function.apply(*inputs, plan, how)  # type: ignore[no-untyped-call]
    return loss


def planned_joiner(
    am: Tensor,
    lm: Tensor,
    layers: OutputLayers,
    utterances: Utterances,
    *,
    start: Tensor | None,
    columns: int,
    activation: int,
    recursion: Recursion,
) -> PlannedJoiner:
    """The arguments of joiner_loss, for am (N,T,D) and lm (N,U+1,D); start (N,T): of a band of that
    many columns, None for the whole lattice.

    Rows are packed where the host knows the lengths, because then their number is known without
    waiting, and where the products can take it from the device; else padded.

    Of RNN-T on the whole lattice, the backward pass may leave out rows with next to no occupancy
    (active_rows.py); it then takes the number of rows from the device.
    """
    weight, bias = layers.joined()
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
    can_skip = start is None and recursion.tdt is None and gradient_bytes <= _LARGE_GRADIENT_BYTES
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
    sizes = (frames, columns, *chunks, is_counted, layers.weight.shape[0])
    plan = JoinerPlan(*sizes, activation, recursion.loss)
    active = None
    if is_active:
        am, lm = aligned(am), aligned(lm)
        active = ActivePlan.of(plan, hidden, width, rows_on_device)
        bias = weight.new_zeros(weight.shape[0]) if bias is None else bias
    else:
        weight, bias = padded_output(weight, bias, dtype)
    inputs = JoinerInputs(am, lm, weight, bias, *utterances.tensors, start, splits)
    return PlannedJoiner(inputs, plan, recursion, active)


def counts_rows(am: Tensor, rows: int) -> bool:
    """True if the loss of a whole lattice with room for that many rows packs them on the device and
    computes those that exist; am is in the dtype of the products."""
    return rows >= FEWEST_ROWS and not torch.compiler.is_compiling() and can_count_rows(am)
