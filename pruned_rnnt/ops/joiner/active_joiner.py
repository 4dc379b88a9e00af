"""The exact loss of a joiner whose backward pass computes its active rows only (active_rows.py).

Used for large whole lattices in bfloat16 on CUDA devices whose matrix products take their number of
rows from the device. It also serves lengths on the device: rows are then packed there, and the
products of the forward pass leave out what would be padding.

    forward    chunks of all rows: hidden rows, logits, log-probabilities; then the recursion
    backward   the gradients over the active rows (active_gradients.py)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.autograd import refuses_second_derivative
from pruned_rnnt.ops.common.library import accumulator
from pruned_rnnt.ops.common.matrix_products import can_multiply_first_rows
from pruned_rnnt.ops.common.native import has_native_kernel
from pruned_rnnt.ops.joiner import active_rows
from pruned_rnnt.ops.joiner.active_gradients import (
    BIAS_COLUMNS,
    ActiveChunks,
    active_gradients,
    raise_if_out_of_memory,
)
from pruned_rnnt.ops.joiner.fused_log_probs import (
    JoinerGradients,
    JoinerInputs,
    JoinerPlan,
    Workspace,
    fused_log_probs,
)
from pruned_rnnt.ops.joiner.log_probs import RowLogProbs, RowStatistics
from pruned_rnnt.ops.joiner.output_layer import converted_output
from pruned_rnnt.ops.joiner.packed_log_probs import packed_log_probs
from pruned_rnnt.ops.lattice.recursion import Recursion, run_recursion

# Lattices of fewer rows have so little work that more launches would take longer.
FEWEST_ROWS = 1 << 16
# The most that the hidden rows, logits and their gradients of a chunk may take, about; and with
# lengths on the device, where chunks without rows are launched, too, at least in CUDA graphs.
CHUNK_BYTES = 160 << 20
DEVICE_CHUNK_BYTES = 224 << 20


def uses_active_rows(am: Tensor, rows: int) -> bool:
    """True if the loss of a whole lattice with that many rows computes its active rows only; am is
    in the dtype of the products."""
    return (
        rows >= FEWEST_ROWS
        and am.shape[2] % BIAS_COLUMNS == 0
        and not torch.compiler.is_compiling()
        and can_multiply_first_rows(am)
        and has_native_kernel("active_gradients", am.device.type)
    )


def chunk_bytes(rows_on_device: bool) -> int:
    """The most that a chunk of either pass may take."""
    return DEVICE_CHUNK_BYTES if rows_on_device else CHUNK_BYTES


class ActivePlan(NamedTuple):
    """chunk_rows: of a chunk of active rows. rows_on_device: rows are packed, but only the device
    knows how many there are; the last offset of the JoinerPlan is the most there can be."""

    chunk_rows: int
    rows_on_device: bool

    @classmethod
    def of(cls, joiner: JoinerPlan, width: int, columns: int, rows_on_device: bool) -> ActivePlan:
        """For hidden rows of `width` elements and V' = `columns` logits, of 2 bytes each."""
        row_bytes = 2 * (2 * width + BIAS_COLUMNS + columns)
        return cls(max(joiner.columns, chunk_bytes(rows_on_device) // row_bytes), rows_on_device)


def _scores(inputs: JoinerInputs, plan: JoinerPlan, active_plan: ActivePlan) -> RowLogProbs:
    """px, py and lse (R) acc of all rows."""
    am, (columns, width), chunk_rows = inputs.am, inputs.weight.shape, plan.largest
    scores = RowLogProbs(*am.new_empty(3, plan.rows, dtype=accumulator(am.dtype)).unbind())
    if not active_plan.rows_on_device:
        workspace = Workspace(am.new_empty(chunk_rows, width), am.new_empty(chunk_rows, columns))
        fused_log_probs(inputs, *plan, workspace, scores, None)
        return scores
    hidden = am.new_empty(chunk_rows, width + BIAS_COLUMNS)
    try:
        packed_log_probs(inputs, *plan, hidden, scores)
    except RuntimeError:
        raise_if_out_of_memory(am, chunk_rows * columns)
        raise
    return scores


def _gradients(
    ctx: Any, grad_loss: Tensor, inputs: JoinerInputs, statistics: RowStatistics, total: Tensor
) -> list[Tensor | None]:
    """The gradients of am, lm, weight and bias, in the dtypes of the loss's arguments; None for a
    weight or bias that is frozen."""
    plan, active_plan = ctx.plans
    acc, dtype = statistics.lse.dtype, inputs.am.dtype
    of_layer = [
        torch.empty_like(x, dtype=dtype if to == dtype else acc) if wanted else None
        for x, to, wanted in zip(inputs[2:4], ctx.dtypes, ctx.needs_input_grad[2:4], strict=True)
    ]
    grads = JoinerGradients(torch.empty_like(inputs.am), torch.empty_like(inputs.lm), *of_layer)
    chunks = ActiveChunks.of(active_plan.chunk_rows, inputs.weight)
    try:
        given = (grad_loss, inputs, *plan, statistics, total, chunks)
        active_gradients(*given, active_rows.DROPPED_OCCUPANCY, grads)
    except RuntimeError:
        (columns, width), count = inputs.weight.shape, chunks.chunk_rows + plan.columns
        last = max(count * width, chunks.blocks * columns * width)
        raise_if_out_of_memory(inputs.am, count * (width + BIAS_COLUMNS), count * columns, last)
        raise
    for i, (grad, to) in enumerate(zip(of_layer, ctx.dtypes, strict=True)):
        if grad is not None and (len(grad) > plan.vocabulary or grad.dtype != to):
            of_layer[i] = grad[: plan.vocabulary].to(to)
    return [grads.grad_am, grads.grad_lm, *of_layer]


class ActiveLoss(torch.autograd.Function):
    """Loss (N,) acc of the fields of JoinerInputs, with weight (V,D) and bias (V) in any dtype, a
    JoinerPlan and an ActivePlan."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        am, lm, weight, bias, *lattice, plan, active_plan = arguments
        # Here, so that their gradients need not be rounded to the dtype of the products.
        inputs = JoinerInputs(am, lm, *converted_output(weight, bias, am.dtype), *lattice)
        px, py, lse = _scores(inputs, plan, active_plan)
        rows, recursion = plan.lattice_rows(inputs), Recursion(plan.options)
        total, gx, gy, *_ = run_recursion(px, py, rows, recursion)
        ctx.save_for_backward(*inputs, lse, gx, gy, total)
        ctx.plans, ctx.dtypes = (plan, active_plan), (weight.dtype, bias.dtype)
        return -total

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, lse, gx, gy, total = ctx.saved_tensors
        upstream = grad_loss.to(lse.dtype).contiguous()
        statistics = RowStatistics(lse, gx, gy)
        inputs = JoinerInputs(*tensors)
        return *_gradients(ctx, upstream, inputs, statistics, total), *[None] * 7
