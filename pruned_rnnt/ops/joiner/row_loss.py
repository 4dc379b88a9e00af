"""The loss of logits kept as rows, of RNN-T, TDT and multi-blank: log_probs and the recursion
forward, log_probs_backward and duration_gradient back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pruned_rnnt.ops.common.autograd import opaque_to_compile, refuses_second_derivative
from pruned_rnnt.ops.common.library import LOG_ZERO, accumulator, new_outputs
from pruned_rnnt.ops.common.row_geometry import LatticeRows
from pruned_rnnt.ops.joiner.log_probs import (
    LOG_PROBS,
    RowLogProbs,
    RowStatistics,
    duration_gradient,
    log_probs,
    log_probs_backward,
)
from pruned_rnnt.ops.lattice.recursion import LossOptions, Recursion, run_recursion


def is_in_place(wanted: bool) -> bool:
    """Whether a gradient is written over logits. Not in torch.compile, which must see this call:
    torch 2.11 does not know in functions that are opaque to it that it compiles."""
    return bool(wanted) and not torch.compiler.is_compiling()


def _needs_zeros(logits: Tensor, options: LossOptions) -> bool:
    """Whether log_probs_backward writes only parts of the gradient."""
    return logits.is_cuda and options.normalization == LOG_PROBS


def _reduced(total: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return total
    # Of one utterance without a kernel: the time of so small a loss is that of its launches.
    if total.shape[0] == 1:
        return total.squeeze(0)
    return total.mean() if reduction == "mean" else total.sum()


def _of_utterances(grad: Tensor, shape: torch.Size, reduction: str) -> Tensor:
    """The gradient of each utterance's loss, contiguous, for that of the reduced loss."""
    if shape[0] == 1:
        return grad.reshape(shape)
    if reduction == "mean":
        grad = grad.expand(shape) / shape[0]
    return grad.expand(shape).contiguous()


def _blank_log_probs(logits: Tensor, lse: Tensor, blanks: tuple[int, ...]) -> Tensor:
    """(R,1+K) acc: 0, then the log-probabilities of the blanks."""
    chosen = torch.stack([logits[:, column] for column in blanks], 1)
    return pad(chosen - lse.clamp_min(LOG_ZERO)[:, None], (1, 0))


class _RowLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, duration_logits: Tensor | None, targets: Tensor, *arguments: Any
    ) -> Tensor:
        *row_fields, ctx.recursion, ctx.reduction, ctx.in_place = arguments
        rows, recursion = LatticeRows(*row_fields), ctx.recursion
        options, acc = recursion.loss, accumulator(logits.dtype)
        # Here and not before: the view would be a node of autograd's graph.
        flat = logits.view(-1, logits.shape[-1])
        # By those that backward needs and the others.
        px, py = new_outputs(2, logits, flat.shape[:1], acc)
        lse, gx, gy = new_outputs(3, logits, flat.shape[:1], acc)
        outputs = RowLogProbs(px, py, lse)
        log_probs(flat, targets, rows, 0, options.blank, options.normalization, outputs)
        ctx.duration_dtype = logits.dtype if duration_logits is None else duration_logits.dtype
        scores = None if duration_logits is None else duration_logits.to(acc)
        if recursion.blanks:
            py.zero_()
            scores = _blank_log_probs(flat, lse, recursion.blanks)
        arcs = (rows, recursion, scores)
        sums = run_recursion(px, py, *arcs, symbols=targets.shape[1], occupancies=(gx, gy))
        total, _, _, *durations = sums
        gd = durations[1] if durations else None
        if recursion.blanks and scores is not None and gd is not None:
            # With the symbols in the first column, duration_gradient is that of the blanks.
            scores[:, 0] = torch.log1p(-scores[:, 1:].exp().sum(1).clamp(max=1))
            gd[:, 0] *= 1 + options.fastemit_lambda
        *row_tensors, frames, columns = rows
        # The gradient of log-probabilities does not depend on them.
        is_needed = options.normalization != LOG_PROBS or ctx.in_place
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        kept = logits if is_needed else None
        ctx.zeros = None
        if ctx.needs_input_grad[0] and not is_needed and _needs_zeros(logits, options):
            # Here the device fills them while the host prepares the rest.
            ctx.zeros = torch.zeros_like(logits)
        ctx.save_for_backward(kept, scores, gd, targets, lse, gx, gy, *row_tensors)
        ctx.sizes = (frames, columns)
        return _reduced(total, ctx.reduction).neg_()

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits, scores, gd, targets, lse, gx, gy, *row_tensors = ctx.saved_tensors
        statistics, rows = RowStatistics(lse, gx, gy), LatticeRows(*row_tensors, *ctx.sizes)
        upstream = _of_utterances(grad_loss.to(lse.dtype), rows.logit_lengths.shape, ctx.reduction)
        options, in_place, grad_durations = ctx.recursion.loss, ctx.in_place, None
        if gd is not None:
            grad_durations = torch.empty_like(scores, dtype=ctx.duration_dtype)
            duration_gradient(upstream, scores, gd, rows, 0, options.clamp, grad_durations)
        if logits is None:
            # In the memory of the gradient itself, which nothing reads.
            grad_logits, ctx.zeros = ctx.zeros, None
            if grad_logits is None:
                new = lse.new_zeros if lse.is_cuda else lse.new_empty
                grad_logits = new(ctx.shape, dtype=ctx.dtype)
            logits = grad_logits
        elif in_place:
            grad_logits = logits.detach()
            if _needs_zeros(logits, options):
                grad_logits.zero_()
        else:
            new_like = torch.zeros_like if _needs_zeros(logits, options) else torch.empty_like
            grad_logits = new_like(logits)
        flat, flat_grad = (x.view(-1, ctx.shape[-1]) for x in (logits, grad_logits))
        given = (upstream, flat, statistics, targets, rows, 0, options.of_gradient)
        log_probs_backward(*given, flat_grad)
        if in_place:
            # Makes torch raise for a second backward pass or another use of the logits.
            torch.autograd.graph.increment_version(logits)
        if ctx.recursion.blanks and grad_durations is not None:
            for n, column in enumerate(ctx.recursion.blanks, 1):
                flat_grad[:, column] = grad_durations[:, n]
            grad_durations = None
        return grad_logits, grad_durations, *[None] * 10


@opaque_to_compile
def row_loss(
    logits: Tensor,
    duration_logits_RK: Tensor | None,
    targets: Tensor,
    rows: LatticeRows,
    recursion: Recursion,
    *,
    reduction: str = "none",
    in_place: bool = False,
) -> Tensor:
    """Loss = -log P of contiguous logits (...,V) with R rows and, of TDT, duration_logits (R,K),
    acc: (N,), or its `mean` or `sum`.

    in_place writes the gradient of logits over them in the backward pass.
    """
    # Field by field: autograd functions see only tensors that are arguments themselves.
    fields = (targets, *rows, recursion, reduction, in_place)
    loss: Tensor = _RowLoss.apply(logits, duration_logits_RK, *fields)  # type: ignore[no-untyped-call]
    return loss
