"""The exact loss of a joiner whose backward pass computes its active rows only (active_rows.py).

Used for large whole lattices in bfloat16 on CUDA devices whose matrix products take their number of
rows from the device. It also serves lengths on the device: rows are then packed there, and the
products of the forward pass leave out what would be padding.

    forward    chunks of all rows: hidden rows, logits, log-probabilities; then the recursion
    backward   list of active rows; chunks of these: hidden rows, logits, gradient of the logits,
               gradients of weight and bias, of hidden rows, of am and lm
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.autograd import refuses_second_derivative
from pruned_rnnt.ops.common.column_sums import column_sums
from pruned_rnnt.ops.common.library import accumulator
from pruned_rnnt.ops.common.matrix_products import (
    can_multiply_first_rows,
    multiply_first_rows,
    row_block_products,
)
from pruned_rnnt.ops.common.native import has_native_kernel
from pruned_rnnt.ops.common.needed_chunks import needed_chunks
from pruned_rnnt.ops.common.row_geometry import LatticeRows
from pruned_rnnt.ops.joiner.active_rows import (
    ActiveRows,
    active_joiner_rows,
    active_joiner_rows_backward,
    active_log_probs_backward,
    active_rows,
    all_rows,
)
from pruned_rnnt.ops.joiner.fused_log_probs import (
    JoinerInputs,
    JoinerPlan,
    Workspace,
    fused_log_probs,
)
from pruned_rnnt.ops.joiner.log_probs import RowLogProbs, RowStatistics, log_probs
from pruned_rnnt.ops.joiner.row_loss import run_recursion

# Lattices of fewer rows have so little work that more launches would take longer.
FEWEST_ROWS = 1 << 16
# The most that the hidden rows, logits and their gradients of a chunk may take, about.
CHUNK_BYTES = 160 << 20
# Columns behind those of hidden rows: 1 for the bias, and zeros up to 16 bytes.
_BIAS_COLUMNS = 8
# Columns times parts of the rows whose gradients of the bias are summed in parallel: three blocks,
# of 512 columns, on each multiprocessor of a large device.
_BIAS_SUMS = 396 * 512
# Tiles of 128 x 256 elements that fill a device, about.
_TILES = 264


def uses_active_rows(am: Tensor, rows: int) -> bool:
    """True if the loss of a whole lattice with that many rows computes its active rows only; am is
    in the dtype of the products."""
    return (
        rows >= FEWEST_ROWS
        and am.shape[2] % _BIAS_COLUMNS == 0
        and not torch.compiler.is_compiling()
        and can_multiply_first_rows(am)
        and has_native_kernel("active_joiner_rows", am.device.type)
    )


class ActivePlan(NamedTuple):
    """chunk_rows: of a chunk of active rows. rows_on_device: rows are packed, but only the device
    knows how many there are; the last offset of the JoinerPlan is the most there can be."""

    chunk_rows: int
    rows_on_device: bool

    @classmethod
    def of(cls, joiner: JoinerPlan, width: int, columns: int, rows_on_device: bool) -> ActivePlan:
        """For hidden rows of `width` elements and V' = `columns` logits, of 2 bytes each."""
        row_bytes = 2 * (2 * width + _BIAS_COLUMNS + columns)
        return cls(max(joiner.columns, CHUNK_BYTES // row_bytes), rows_on_device)


def _weight_and_bias(inputs: JoinerInputs) -> Tensor:
    """(V',D+8): weight, bias and zeros, the factors of hidden rows with their column of ones."""
    zeros = inputs.weight.new_zeros((inputs.weight.shape[0], _BIAS_COLUMNS - 1))
    return torch.cat((inputs.weight, inputs.bias[:, None], zeros), dim=1)


def _logits(
    inputs: JoinerInputs,
    layer: Tensor,
    rows: LatticeRows,
    active: ActiveRows,
    chunk: int,
    size: Tensor,
    activation: int,
    hidden: Tensor,
) -> Tensor:
    """Logits (C,V') of the rows of a chunk, of which there are `size` (1,), by the layer of
    _weight_and_bias; hidden (C,D+8) holds their hidden rows afterwards."""
    active_joiner_rows(inputs.am, inputs.lm, rows, active, chunk, activation, hidden)
    return multiply_first_rows(hidden, layer.t(), size)


def _scores(inputs: JoinerInputs, plan: JoinerPlan, active_plan: ActivePlan) -> RowLogProbs:
    """px, py and lse (R) acc of all rows."""
    am, weight = inputs.am, inputs.weight
    acc = accumulator(am.dtype)
    scores = RowLogProbs(*am.new_empty((3, plan.rows), dtype=acc).unbind(0))
    if not active_plan.rows_on_device:
        sizes = ((plan.largest, am.shape[2]), (plan.largest, weight.shape[0]))
        fused_log_probs(inputs, *plan, *Workspace(*map(am.new_empty, sizes)), *scores, None)
        return scores
    assert inputs.row_splits is not None
    rows, chunk_rows = plan.lattice_rows(inputs), active_plan.chunk_rows
    every = all_rows(inputs.row_splits[-1], plan.rows, chunk_rows)
    sizes_K, layer = every.begins.diff(), _weight_and_bias(inputs)
    hidden = am.new_empty((chunk_rows, am.shape[2] + _BIAS_COLUMNS))
    blank, normalization, *_ = plan.options
    for chunk in needed_chunks(inputs.row_splits[-1], chunk_rows, sizes_K.shape[0]):
        begin, size = chunk * chunk_rows, sizes_K[chunk : chunk + 1]
        padded = _logits(inputs, layer, rows, every, chunk, size, plan.activation, hidden)
        logits = padded[: plan.rows - begin, : plan.vocabulary]
        log_probs(logits, inputs.targets, rows, begin, blank, normalization, scores)
    return scores


def _gradients(
    grad_loss: Tensor,
    inputs: JoinerInputs,
    plan: JoinerPlan,
    active_plan: ActivePlan,
    statistics: RowStatistics,
) -> tuple[Tensor, ...]:
    """The gradients of am, lm, weight and bias, in their dtype."""
    am, lm, weight, bias, *_ = inputs
    rows, (_, _, fastemit_lambda, _) = plan.lattice_rows(inputs), plan.options.of_gradient
    chunk_rows, blocks = active_plan.chunk_rows, _blocks(weight)
    active, block_ends_KG = active_rows(statistics, rows, fastemit_lambda, chunk_rows, blocks)
    layer, width = _weight_and_bias(inputs), am.shape[2]
    # A chunk ends with the frame in which it becomes full.
    longest = min(chunk_rows + plan.columns, plan.rows)
    hidden = am.new_empty((longest, width + _BIAS_COLUMNS))
    acc, grad_am = statistics.lse.dtype, torch.zeros_like(am)
    grad_lm = torch.zeros_like(lm, dtype=acc)
    grad_weight = torch.empty_like(weight, dtype=acc)
    grad_bias = torch.empty_like(bias, dtype=acc)
    parts = max(1, _BIAS_SUMS // max(512, len(bias)))
    bias_sums = grad_bias.new_zeros((parts, len(bias)))
    scoring = (plan.vocabulary, *plan.options.of_gradient)
    for chunk in needed_chunks(active.places[-1], chunk_rows, block_ends_KG.shape[0]):
        at, ends_G = (rows, active, chunk), block_ends_KG[chunk]
        size = ends_G[-1:]
        logits = _logits(inputs, layer, *at, size, plan.activation, hidden)
        given = (grad_loss, statistics, inputs.targets, *at, *scoring)
        active_log_probs_backward(*given, logits, bias_sums)
        column_sums(
            row_block_products(logits, hidden[:, :width], ends_G).flatten(1),
            grad_weight.flatten(),
            add=chunk > 0,
        )
        grad_hidden = multiply_first_rows(logits, weight, size)
        active_joiner_rows_backward(grad_hidden, hidden, *at, plan.activation, grad_am, grad_lm)
        # Before the next chunk needs room for its own.
        del logits, grad_hidden
    column_sums(bias_sums, grad_bias, add=False)
    return tuple(x.to(am.dtype) for x in (grad_am, grad_lm, grad_weight, grad_bias))


def _blocks(weight: Tensor) -> int:
    """The number of blocks of rows that are multiplied in parallel: the products over many rows
    have few elements."""
    tiles = -(-weight.shape[0] // 128) * -(-weight.shape[1] // 256)
    return max(1, min(16, _TILES // tiles))


class ActiveLoss(torch.autograd.Function):
    """Loss (N,) acc of the fields of JoinerInputs, a JoinerPlan and an ActivePlan."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, plan, active_plan = arguments
        inputs = JoinerInputs(*tensors)
        px, py, lse = _scores(inputs, plan, active_plan)
        total, gx, gy = run_recursion(px, py, plan.lattice_rows(inputs), plan.options)
        ctx.save_for_backward(*tensors, lse, gx, gy)
        ctx.plans = plan, active_plan
        return -total

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, lse, gx, gy = ctx.saved_tensors
        statistics = RowStatistics(lse, gx, gy)
        upstream = grad_loss.to(lse.dtype).contiguous()
        plan, active_plan = ctx.plans
        grads = _gradients(upstream, JoinerInputs(*tensors), plan, active_plan, statistics)
        return *grads, *[None] * 7
