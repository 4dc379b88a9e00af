"""The loss of logits kept as rows: log_probs and band_lattice forward, log_probs_backward back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.autograd import refuses_second_derivative
from pruned_rnnt.ops.common.library import accumulator
from pruned_rnnt.ops.common.opaque import opaque_to_compile
from pruned_rnnt.ops.common.row_geometry import LatticeRows
from pruned_rnnt.ops.joiner.log_probs import (
    LOG_PROBS,
    RowLogProbs,
    RowStatistics,
    log_probs,
    log_probs_backward,
)
from pruned_rnnt.ops.lattice.band_lattice import band_lattice
from pruned_rnnt.ops.lattice.lattice import LatticeSums, split_workspace


class LossOptions(NamedTuple):
    """The scalars that the recursion and its gradient depend on.

    blank: 0..V-1. normalization: log_probs.LOGITS, LOG_PROBS or HAT. rnnt_type: as in
    library.RNNT_TYPES. clamp: 0.0 for none.
    """

    blank: int
    normalization: int
    rnnt_type: int
    delay_penalty: float
    fastemit_lambda: float
    clamp: float

    @property
    def of_gradient(self) -> tuple[int, int, float, float]:
        """The options of log_probs_backward."""
        return self.blank, self.normalization, self.fastemit_lambda, self.clamp


def run_recursion(px: Tensor, py: Tensor, rows: LatticeRows, options: LossOptions) -> LatticeSums:
    """total (N,) = log P and occupancies gx, gy for px and py of any shape with R elements."""
    gx, gy = px.new_empty((2, *px.shape)).unbind(0)
    total = px.new_empty(rows.logit_lengths.shape)
    work = split_workspace(px, total.shape[0], rows.columns, rows.frames)
    flat = (px, py, gx, gy)
    if px.dim() > 1:
        flat = (px.view(-1), py.view(-1), gx.view(-1), gy.view(-1))
    topology = (options.rnnt_type, options.delay_penalty)
    band_lattice(*flat[:2], rows, *topology, work, LatticeSums(total, *flat[2:]))
    return LatticeSums(total, gx, gy)


def is_in_place(wanted: bool) -> bool:
    """Whether a gradient is written over logits. Not in torch.compile, which must see this call:
    torch 2.11 does not know in functions that are opaque to it that it compiles."""
    return wanted and not torch.compiler.is_compiling()


def logits_gradient(
    grad_loss: Tensor,
    logits: Tensor,
    statistics: RowStatistics,
    targets: Tensor,
    rows: LatticeRows,
    options: LossOptions,
    in_place: bool,
) -> Tensor:
    """The gradient of logits (R,V) for grad_loss (N,) acc; in_place writes it over them."""
    grad_logits = logits.detach() if in_place else torch.empty_like(logits)
    scoring = options.of_gradient
    log_probs_backward(grad_loss, logits, statistics, targets, rows, 0, *scoring, grad_logits)
    if in_place:
        # Makes torch raise for a second backward pass or another use of the logits.
        torch.autograd.graph.increment_version(logits)
    return grad_logits


def _reduced(total: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return total
    # Of one utterance without a kernel: the time of so small a loss is that of its launches.
    if total.shape[0] == 1:
        return total.squeeze(0)
    return total.mean() if reduction == "mean" else total.sum()


def _of_utterances(grad: Tensor, shape: torch.Size, reduction: str) -> Tensor:
    """The gradient of each utterance's loss, contiguous, for that of the reduced loss."""
    if reduction == "mean" and shape[0] != 1:
        grad = grad.expand(shape) / shape[0]
    return grad.expand(shape).contiguous()


class _RowLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, *arguments: Any) -> Tensor:
        *row_fields, ctx.options, ctx.reduction, ctx.in_place = arguments
        rows, options = LatticeRows(*row_fields), ctx.options
        lse = logits.new_empty((logits.shape[0],), dtype=accumulator(logits.dtype))
        px, py = lse.new_empty((2, *lse.shape)).unbind(0)
        outputs = RowLogProbs(px, py, lse)
        log_probs(logits, targets, rows, 0, options.blank, options.normalization, outputs)
        total, gx, gy = run_recursion(px, py, rows, options)
        *row_tensors, frames, columns = rows
        # The gradient of log-probabilities does not depend on them.
        is_needed = options.normalization != LOG_PROBS or ctx.in_place
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        kept = logits if is_needed else None
        ctx.save_for_backward(kept, targets, lse, gx, gy, *row_tensors)
        ctx.sizes = (frames, columns)
        return _reduced(total, ctx.reduction).neg_()

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, lse, gx, gy, *row_tensors = ctx.saved_tensors
        statistics, rows = RowStatistics(lse, gx, gy), LatticeRows(*row_tensors, *ctx.sizes)
        upstream = _of_utterances(grad_loss.to(lse.dtype), rows.logit_lengths.shape, ctx.reduction)
        in_place = ctx.in_place
        if logits is None:
            # The memory of the gradient itself, which nothing reads.
            logits, in_place = lse.new_empty(ctx.shape, dtype=ctx.dtype), is_in_place(True)
        arguments = (statistics, targets, rows, ctx.options, in_place)
        return logits_gradient(upstream, logits, *arguments), *[None] * 10


@opaque_to_compile
def row_loss(
    logits_RV: Tensor,
    targets: Tensor,
    rows: LatticeRows,
    options: LossOptions,
    in_place: bool = False,
    reduction: str = "none",
) -> Tensor:
    """Loss = -log P of contiguous logits (R,V), acc: (N,), or its `mean` or `sum`.

    in_place writes the gradient over the logits in the backward pass.
    """
    # Field by field: autograd functions see only tensors that are arguments themselves.
    loss: Tensor = _RowLoss.apply(logits_RV, targets, *rows, options, reduction, in_place)  # type: ignore[no-untyped-call]
    return loss
