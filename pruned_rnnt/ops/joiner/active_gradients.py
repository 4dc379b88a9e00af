"""The gradients of a joiner over the active rows (active_rows.py) of a whole lattice.

One op: the list of active rows, then chunks of them, for which it computes hidden rows and logits,
the gradient of the logits, those of weight and bias, of hidden rows, of am and lm.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.column_sums import column_sums
from pruned_rnnt.ops.common.library import Out, op
from pruned_rnnt.ops.common.matrix_products import multiply_first_rows, row_block_products
from pruned_rnnt.ops.common.row_geometry import LatticeRows
from pruned_rnnt.ops.joiner.active_rows import (
    ActiveRows,
    active_joiner_rows,
    active_joiner_rows_backward,
    active_log_probs_backward,
    active_rows,
)
from pruned_rnnt.ops.joiner.fused_log_probs import JoinerGradients, JoinerInputs, JoinerPlan
from pruned_rnnt.ops.joiner.log_probs import RowStatistics

# Columns behind those of hidden rows: 1 for the bias, and zeros up to 16 bytes.
BIAS_COLUMNS = 8
# Columns times parts of the rows whose gradients of the bias are summed in parallel: three blocks,
# of 512 columns, on each multiprocessor of a large device.
_BIAS_SUMS = 396 * 512
# Tiles of 128 x 256 elements that fill a device, about.
_TILES = 264


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
    active, block_ends_KG = active_rows(
        statistics, total, rows, options.fastemit_lambda, left_out, chunks.chunk_rows, chunks.blocks
    )
    layer, width, acc = weight_and_bias(weight, bias), am.shape[2], statistics.lse.dtype
    # A chunk ends with the frame in which it becomes full.
    longest = min(chunks.chunk_rows + plan.columns, plan.rows)
    hidden = am.new_empty((longest, width + BIAS_COLUMNS))
    grads.grad_am.zero_()
    grad_lm = torch.zeros_like(lm, dtype=acc)
    grad_weight = torch.empty_like(weight, dtype=acc)
    bias_sums = torch.zeros((chunks.bias_parts, len(bias)), dtype=acc, device=bias.device)
    # At least one, which assigns the gradient of the weight.
    for chunk in range(max(1, -(-int(active.places[-1]) // chunks.chunk_rows))):
        at, ends_G = (rows, active, chunk), block_ends_KG[chunk]
        size = ends_G[-1:]
        logits = chunk_logits(am, lm, layer, *at, size, plan.activation, hidden)
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


def weight_and_bias(weight: Tensor, bias: Tensor) -> Tensor:
    """(V',D+8): weight, bias and zeros, the factors of hidden rows with their column of ones."""
    zeros = weight.new_zeros((weight.shape[0], BIAS_COLUMNS - 1))
    return torch.cat((weight, bias[:, None], zeros), dim=1)


def chunk_logits(
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
    weight_and_bias; hidden (C,D+8) holds their hidden rows afterwards."""
    active_joiner_rows(am, lm, rows, active, chunk, activation, hidden)
    return multiply_first_rows(hidden, layer.t(), size)


def raise_if_out_of_memory(like: Tensor, *sizes: int) -> None:
    """torch's OutOfMemoryError if the device has no room for tensors of these numbers of elements:
    errors of torch inside of a kernel reach the caller as plain RuntimeErrors."""
    held = [like.new_empty(size) for size in sizes]
    del held
