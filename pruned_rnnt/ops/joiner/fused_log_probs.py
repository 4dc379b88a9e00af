"""Log-probabilities of a joiner's logits that are computed, chunk by chunk, in a workspace.

V' >= V are the rows of the output layer, padded for its matrix products, C those of the largest
chunk; the logits of TDT's K durations are the columns behind V.

Two ops call joiner_rows, a matrix product and log_probs for one chunk after the other, on every
device. They are ops so that torch.compile sees one node. How the chunks are chosen and kept is in
fused_joiner.py.
"""

from __future__ import annotations

from itertools import pairwise
from operator import sub
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pruned_rnnt.ops.common.library import Out, op
from pruned_rnnt.ops.common.matrix_products import (
    column_sums,
    counted_rows_product,
    counted_rows_weight_sums,
    multiply_into,
)
from pruned_rnnt.ops.common.row_geometry import LatticeRows
from pruned_rnnt.ops.joiner.joiner_rows import joiner_rows, joiner_rows_backward
from pruned_rnnt.ops.joiner.log_probs import (
    RowLogProbs,
    RowStatistics,
    duration_gradient,
    log_probs,
    log_probs_backward,
)
from pruned_rnnt.ops.lattice.recursion import LossOptions

# V' is a multiple of it: 16-bit matrix products of other widths take more than twice the time.
_WIDTH_MULTIPLE = 8


def padded_width(vocabulary: int) -> int:
    """V' of V."""
    return vocabulary + -vocabulary % _WIDTH_MULTIPLE


def padded_output(
    weight_VD: Tensor, bias_V: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """weight and bias (None: zeros) in that dtype with rows of zeros up to V' (differentiable)."""
    vocabulary = weight_VD.shape[0]
    missing = padded_width(vocabulary) - vocabulary
    weight_VD = weight_VD.to(dtype)
    bias_V = weight_VD.new_zeros(vocabulary) if bias_V is None else bias_V.to(dtype)
    if missing:
        weight_VD, bias_V = pad(weight_VD, (0, 0, 0, missing)), pad(bias_V, (0, missing))
    return weight_VD.contiguous(), bias_V.contiguous()


def aligned(x: Tensor) -> Tensor:
    """x, or a copy: parameters may begin anywhere in a larger buffer, where products that read 16
    bytes at a time cannot."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


@op
def output_layer(
    weight: Tensor, bias: Tensor, padded_weight: Out[Tensor], padded_bias: Out[Tensor]
) -> None:
    """weight (V,D) and bias (V), contiguous and of one floating dtype -> padded_weight (V',D) and
    padded_bias (V') of any: the same with rows of zeros."""
    for x, padded in ((weight, padded_weight), (bias, padded_bias)):
        padded[: len(x)] = x
        padded[len(x) :] = 0


def converted_output(weight: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """padded_output in one launch, and without a gradient."""
    rows = padded_width(weight.shape[0])
    if weight.dtype != bias.dtype or not (weight.is_contiguous() and bias.is_contiguous()):
        weight, bias = padded_output(weight, bias, dtype)
        return aligned(weight), bias
    if rows == weight.shape[0] and weight.dtype == dtype and weight.data_ptr() % 16 == 0:
        return weight, bias
    padded_weight = weight.new_empty(rows, weight.shape[1], dtype=dtype)
    padded_bias = bias.new_empty(rows, dtype=dtype)
    output_layer(weight, bias, padded_weight, padded_bias)
    return padded_weight, padded_bias


class JoinerInputs(NamedTuple):
    """am (N,T,D), lm (N,U+1,D), weight (V',D), bias (V') of one dtype; targets and lengths; start
    and row_splits of the rows' geometry."""

    am: Tensor
    lm: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor
    logit_lengths: Tensor
    target_lengths: Tensor
    start: Tensor | None
    row_splits: Tensor | None


class JoinerPlan(NamedTuple):
    """T and S of the rows' geometry; the row at which each chunk begins and their end; the rows
    (whole frames) of a piece of the gradient of hidden; V; and the options of the ops.

    counts_rows: the products take the number of rows from row_splits. If the host does not know it,
    the end is the most there can be, and chunks begin and end within frames."""

    frames: int
    columns: int
    chunk_offsets: list[int]
    hidden_rows: int
    counts_rows: bool
    vocabulary: int
    activation: int
    options: LossOptions

    @property
    def rows(self) -> int:
        return self.chunk_offsets[-1]

    @property
    def largest(self) -> int:
        """Rows of the largest chunk."""
        most: int = max(map(sub, self.chunk_offsets[1:], self.chunk_offsets))
        return most

    def lattice_rows(self, inputs: JoinerInputs) -> LatticeRows:
        *_, logit_lengths, target_lengths, start, row_splits = inputs
        sizes = (self.frames, self.columns)
        return LatticeRows(logit_lengths, target_lengths, start, row_splits, *sizes)


class Workspace(NamedTuple):
    """Hidden rows (C,D) and logits (C,V') of a chunk; forward leaves those of the first one."""

    hidden: Tensor
    logits: Tensor


class JoinerGradients(NamedTuple):
    """Of am (N,T,D), in its dtype or acc; of lm (N,U+1,D), weight (V',D) and bias (V'), in acc.
    None for a weight or bias that is frozen."""

    grad_am: Tensor
    grad_lm: Tensor
    grad_weight: Tensor | None
    grad_bias: Tensor | None


class DurationRows(NamedTuple):
    """Of TDT, otherwise None: duration logits and their occupancies (R,K), both acc."""

    duration_logits: Tensor | None
    gd: Tensor | None


def _duration_columns(logits: Tensor, vocabulary: int, duration_logits: Tensor) -> Tensor:
    return logits[:, vocabulary : vocabulary + duration_logits.shape[1]]


def _compute_logits(
    inputs: JoinerInputs, plan: JoinerPlan, workspace: Workspace, begin: int, end: int
) -> None:
    am, lm, weight, bias, *_ = inputs
    hidden, logits = (x[: end - begin] for x in workspace)
    joiner_rows(am, lm, plan.lattice_rows(inputs), begin, plan.activation, hidden)
    if plan.counts_rows:
        counted_rows_product(hidden, weight.t(), bias, _row_count(inputs), begin, logits)
        return
    # With `out`, which autocast leaves alone: the dtype is chosen before.
    torch.addmm(bias, hidden, weight.t(), out=logits)


def _row_count(inputs: JoinerInputs) -> Tensor:
    """Of packed rows, a scalar."""
    assert inputs.row_splits is not None
    return inputs.row_splits[-1]


@op
def fused_log_probs(
    inputs: JoinerInputs,
    plan: JoinerPlan,
    workspace: Out[Workspace],
    out: Out[RowLogProbs],
    duration_logits: Out[Tensor | None],
) -> None:
    """px, py, lse (R) acc, see log_probs; duration_logits (R,K) acc for TDT."""
    rows, (blank, normalization, *_) = plan.lattice_rows(inputs), plan.options
    for begin, end in reversed(list(pairwise(plan.chunk_offsets))):
        _compute_logits(inputs, plan, workspace, begin, end)
        padded = workspace.logits[: end - begin]
        logits = padded[:, : plan.vocabulary]
        log_probs(logits, inputs.targets, rows, begin, blank, normalization, out)
        if duration_logits is not None:
            columns = _duration_columns(padded, plan.vocabulary, duration_logits)
            duration_logits[begin:end] = columns


@op
def fused_log_probs_backward(
    grad_loss: Tensor,
    inputs: JoinerInputs,
    plan: JoinerPlan,
    statistics: RowStatistics,
    durations: DurationRows,
    has_first_chunk: bool,
    workspace: Out[Workspace],
    grads: Out[JoinerGradients],
) -> None:
    """has_first_chunk: the workspace still holds the first chunk, as the forward left it."""
    rows, hidden_rows, activation = plan.lattice_rows(inputs), plan.hidden_rows, plan.activation
    options = plan.options.of_gradient
    # Frames of padding and positions without frames are in no chunk.
    grads.grad_am.zero_()
    grads.grad_lm.zero_()
    largest, width = workspace.hidden.shape
    grad_hidden = workspace.hidden.new_empty((min(largest, hidden_rows), width))
    # From the beginning, where the forward pass has ended: the last chunks may have no rows.
    for begin, end in pairwise(plan.chunk_offsets):
        hidden, padded = (x[: end - begin] for x in workspace)
        if begin > 0 or not has_first_chunk:
            _compute_logits(inputs, plan, workspace, begin, end)
        logits = padded[:, : plan.vocabulary]
        log_probs_backward(
            grad_loss, logits, statistics, inputs.targets, rows, begin, options, padded
        )
        if durations.duration_logits is not None:
            columns = _duration_columns(padded, plan.vocabulary, durations.duration_logits)
            duration_gradient(grad_loss, *durations, rows, begin, plan.options.clamp, columns)
        if grads.grad_weight is not None:
            if plan.counts_rows:
                sums = grads.grad_weight
                count = _row_count(inputs)
                counted_rows_weight_sums(
                    padded, hidden, count, begin, sums, add=begin > 0, room=grad_hidden
                )
            else:
                multiply_into(grads.grad_weight, padded.t(), hidden, add=begin > 0)
        if grads.grad_bias is not None:
            # Rows that do not exist have zeros.
            column_sums(padded, grads.grad_bias, add=begin > 0)
        for first in range(0, end - begin, hidden_rows):
            piece = slice(first, min(first + hidden_rows, end - begin))
            grad_piece = grad_hidden[: piece.stop - first]
            at = begin + first
            if plan.counts_rows:
                count = _row_count(inputs)
                counted_rows_product(padded[piece], inputs.weight, None, count, at, grad_piece)
            else:
                multiply_into(grad_piece, padded[piece], inputs.weight)
            of_joiner = (grads.grad_am, grads.grad_lm)
            joiner_rows_backward(grad_piece, hidden[piece], rows, at, activation, *of_joiner)
