"""The exact loss of a joiner whose backward pass computes its active rows only (active_rows.py).

Used for large whole lattices in bfloat16 on CUDA devices whose matrix products take their number of
rows from the device. It also serves lengths on the device: rows are then packed there, with room
for the rows of all padding, and the products of the forward pass leave out what would be padding.

    forward    chunks of all rows: hidden rows, logits, log-probabilities; then the recursion
    backward   one op: the list of active rows, then chunks of them, for which it computes hidden
               rows and logits, the gradient of the logits, those of weight and bias, of hidden
               rows, of am and lm
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.autograd import refuses_second_derivative
from pruned_rnnt.ops.common.library import Out, accumulator, new_outputs, op
from pruned_rnnt.ops.common.matrix_products import (
    can_multiply_first_rows,
    column_sums,
    multiply_first_rows,
    row_block_products,
)
from pruned_rnnt.ops.common.native import has_native_kernel
from pruned_rnnt.ops.common.row_geometry import LatticeRows
from pruned_rnnt.ops.joiner import active_rows
from pruned_rnnt.ops.joiner.active_rows import (
    ActiveRows,
    active_joiner_rows,
    active_joiner_rows_backward,
    active_log_probs_backward,
)
from pruned_rnnt.ops.joiner.fused_log_probs import (
    JoinerGradients,
    JoinerInputs,
    JoinerPlan,
    Workspace,
    converted_output,
    fused_log_probs,
)
from pruned_rnnt.ops.joiner.log_probs import RowLogProbs, RowStatistics, log_probs
from pruned_rnnt.ops.lattice.recursion import Recursion, run_recursion

# Lattices of fewer rows have so little work that more launches would take longer. Rows and those of
# a chunk behind them are 32-bit numbers.
FEWEST_ROWS, MOST_ROWS = 1 << 16, (1 << 31) - (1 << 24)
# The most that the hidden rows, logits and their gradients of a chunk may take, about; and with
# lengths on the device, where chunks without rows are launched, too, at least in CUDA graphs.
CHUNK_BYTES = 160 << 20
DEVICE_CHUNK_BYTES = 224 << 20
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
        FEWEST_ROWS <= rows <= MOST_ROWS
        and am.shape[2] % _BIAS_COLUMNS == 0
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
        row_bytes = 2 * (2 * width + _BIAS_COLUMNS + columns)
        return cls(max(joiner.columns, chunk_bytes(rows_on_device) // row_bytes), rows_on_device)


class ActiveChunks(NamedTuple):
    """How the active rows are divided: chunk_rows in a chunk, in as many blocks for the products
    over the rows, because these have few elements; and the parts P of the rows whose gradients of
    the bias are summed in parallel."""

    chunk_rows: int
    blocks: int
    bias_parts: int

    @classmethod
    def of(cls, chunk_rows: int, weight: Tensor) -> ActiveChunks:
        """For weight (V',D)."""
        columns, width = weight.shape
        tiles = -(-columns // 128) * -(-width // 256)
        blocks = max(1, min(16, _TILES // tiles))
        return cls(chunk_rows, blocks, max(1, _BIAS_SUMS // max(512, columns)))


def _weight_and_bias(weight: Tensor, bias: Tensor) -> Tensor:
    """(V',D+8): weight, bias and zeros, the factors of hidden rows with their column of ones."""
    zeros = weight.new_zeros((weight.shape[0], _BIAS_COLUMNS - 1))
    return torch.cat((weight, bias[:, None], zeros), dim=1)


def _chunk_logits(
    am: Tensor,
    lm: Tensor,
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
    active_joiner_rows(am, lm, rows, active, chunk, activation, hidden)
    return multiply_first_rows(hidden, layer.t(), size)


@op
def packed_log_probs(
    inputs: JoinerInputs, plan: JoinerPlan, hidden: Out[Tensor], out: Out[RowLogProbs]
) -> None:
    """px, py and lse (R) acc, see log_probs, for the rows that row_splits has; those behind them,
    for which there is room, are arbitrary. Workspace: hidden (C,D+8), of the chunks' C rows."""
    assert inputs.row_splits is not None
    rows, chunk_rows = plan.lattice_rows(inputs), len(hidden)
    layer = _weight_and_bias(inputs.weight, inputs.bias)
    (blank, normalization, *_), total = plan.options, int(inputs.row_splits[-1])
    numbers = torch.arange(total, dtype=torch.int32, device=hidden.device)
    for begin in range(0, total, chunk_rows):
        begins = torch.tensor([begin, min(begin + chunk_rows, total)], device=hidden.device)
        every = ActiveRows(numbers, numbers, begins, begins, begins)
        at = (rows, every, 0, begins.diff())
        padded = _chunk_logits(inputs.am, inputs.lm, layer, *at, plan.activation, hidden)
        logits = padded[: plan.rows - begin, : plan.vocabulary]
        log_probs(logits, inputs.targets, rows, begin, blank, normalization, out)


@op
def active_gradients(
    grad_loss: Tensor,
    inputs: JoinerInputs,
    plan: JoinerPlan,
    statistics: RowStatistics,
    total: Tensor,
    chunks: ActiveChunks,
    left_out: float,
    grads: Out[JoinerGradients],
) -> None:
    """grad_loss (N) acc -> the gradients of am and lm in their dtype, of weight and bias in theirs
    or in acc. total (N) acc is log P. Rows are left out as by list_active_rows.

    On CUDA nothing waits for the number of active rows: if it has arrived at the host, chunks
    without rows are not launched, and otherwise their kernels have nothing to do. CUDA graphs
    contain all chunks.
    """
    am, lm, weight, bias, *_ = inputs
    rows, options = plan.lattice_rows(inputs), plan.options.of_gradient
    active, block_ends_KG = active_rows.active_rows(
        statistics, total, rows, options.fastemit_lambda, left_out, chunks.chunk_rows, chunks.blocks
    )
    layer, width, acc = _weight_and_bias(weight, bias), am.shape[2], statistics.lse.dtype
    # A chunk ends with the frame in which it becomes full.
    longest = min(chunks.chunk_rows + plan.columns, plan.rows)
    hidden = am.new_empty((longest, width + _BIAS_COLUMNS))
    grads.grad_am.zero_()
    grad_lm = torch.zeros_like(lm, dtype=acc)
    grad_weight = torch.empty_like(weight, dtype=acc)
    bias_sums = torch.zeros((chunks.bias_parts, len(bias)), dtype=acc, device=bias.device)
    # At least one, which assigns the gradient of the weight.
    for chunk in range(max(1, -(-int(active.places[-1]) // chunks.chunk_rows))):
        at, ends_G = (rows, active, chunk), block_ends_KG[chunk]
        size = ends_G[-1:]
        logits = _chunk_logits(am, lm, layer, *at, size, plan.activation, hidden)
        given = (grad_loss, statistics, inputs.targets, *at, plan.vocabulary, options)
        active_log_probs_backward(*given, logits, bias_sums)
        products = row_block_products(logits, hidden[:, :width], ends_G)
        column_sums(products.flatten(1), grad_weight.flatten(), add=chunk > 0)
        grad_hidden = multiply_first_rows(logits, weight, size)
        into = (grads.grad_am, grad_lm)
        active_joiner_rows_backward(grad_hidden, hidden, *at, plan.activation, *into)
        # Before the next chunk needs room for its own.
        del logits, products, grad_hidden
    grads.grad_lm.copy_(grad_lm)
    if grads.grad_weight is not None:
        grads.grad_weight.copy_(grad_weight)
    if grads.grad_bias is not None:
        grads.grad_bias.copy_(bias_sums.sum(0))


def _raise_if_out_of_memory(like: Tensor, *sizes: int) -> None:
    """torch's OutOfMemoryError if the device has no room for tensors of these numbers of elements:
    errors of torch inside of a kernel reach the caller as plain RuntimeErrors."""
    held = [like.new_empty(size) for size in sizes]
    del held


def _scores(inputs: JoinerInputs, plan: JoinerPlan, active_plan: ActivePlan) -> RowLogProbs:
    """px, py and lse (R) acc of all rows."""
    am, (columns, width), chunk_rows = inputs.am, inputs.weight.shape, plan.largest
    scores = RowLogProbs(*new_outputs(3, am, (plan.rows,), accumulator(am.dtype)))
    if not active_plan.rows_on_device:
        workspace = Workspace(am.new_empty(chunk_rows, width), am.new_empty(chunk_rows, columns))
        fused_log_probs(inputs, *plan, workspace, scores, None)
        return scores
    hidden = am.new_empty(chunk_rows, width + _BIAS_COLUMNS)
    try:
        packed_log_probs(inputs, *plan, hidden, scores)
    except RuntimeError:
        _raise_if_out_of_memory(am, chunk_rows * columns)
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
        _raise_if_out_of_memory(inputs.am, count * (width + _BIAS_COLUMNS), count * columns, last)
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
