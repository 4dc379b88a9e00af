"""The TDT loss of logits kept as rows: log_probs and tdt_lattice forward, gradients of both logits
back. Also the loss of multi-blank transducers, whose blanks are the lattice's durations from the
second on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pruned_rnnt.ops.common.autograd import refuses_second_derivative
from pruned_rnnt.ops.common.library import LOG_ZERO, accumulator
from pruned_rnnt.ops.common.opaque import opaque_to_compile
from pruned_rnnt.ops.common.row_geometry import LatticeRows
from pruned_rnnt.ops.joiner.duration_gradient import duration_gradient
from pruned_rnnt.ops.joiner.log_probs import RowLogProbs, RowStatistics, log_probs
from pruned_rnnt.ops.joiner.row_loss import LossOptions, logits_gradient, run_recursion
from pruned_rnnt.ops.lattice.tdt_lattice import TdtOptions, TdtSums, tdt_lattice, tdt_workspace


class TdtLossOptions(NamedTuple):
    """loss: its blank, normalization, fastemit_lambda and clamp. is_plain: the loss is the RNN-T
    loss of the token logits, and the gradient of the duration logits is 0 (omega). blanks: the
    columns of the blanks of a multi-blank transducer, which has no duration logits."""

    loss: LossOptions
    lattice: TdtOptions
    is_plain: bool = False
    blanks: tuple[int, ...] = ()


class TdtRows(NamedTuple):
    """targets (N,U), and the geometry of the rows."""

    targets: Tensor
    geometry: LatticeRows


def run_tdt_recursion(
    px: Tensor, py: Tensor, duration_logits: Tensor, rows: TdtRows, options: TdtLossOptions
) -> TdtSums:
    """total (N,) = log P and occupancies for px, py of any shape with R elements, and
    duration_logits of that shape and K, all acc; gx, gy and stay like px, gd like duration_logits.
    """
    targets, geometry = rows
    if options.is_plain:
        total, gx, gy = run_recursion(px, py, geometry, options.loss)
        return TdtSums(total, gx, gy, gx, torch.zeros_like(duration_logits))
    (batch, symbols), durations = targets.shape, options.lattice.durations
    gx, gy, stay = px.new_empty((3, *px.shape)).unbind(0)
    # Packed rows that no utterance reaches, where lengths were not read, are not written.
    made = torch.empty_like if geometry.row_splits is None else torch.zeros_like
    sums = TdtSums(px.new_empty((batch,)), gx, gy, stay, made(duration_logits))
    by_row = (-1, len(durations))
    gd = sums.gd.view(by_row)
    flat = TdtSums(sums.total, gx.view(-1), gy.view(-1), stay.view(-1), gd)
    px, py = px.view(-1), py.view(-1)
    work = tdt_workspace(px, batch, symbols, durations)
    tdt_lattice(
        px, py, duration_logits.view(by_row), geometry, options.lattice, symbols, work, flat
    )
    return sums


def _blank_log_probs(logits: Tensor, lse: Tensor, blanks: tuple[int, ...]) -> Tensor:
    """(R,1+K) acc: 0, then the log-probabilities of the blanks."""
    chosen = torch.stack([logits[:, column] for column in blanks], 1)
    return pad(chosen - lse.clamp_min(LOG_ZERO)[:, None], (1, 0))


class _TdtRowLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, duration_logits: Tensor | None, *arguments: Any
    ) -> Tensor:
        targets, *row_fields, options, ctx.in_place = arguments
        rows = TdtRows(targets, LatticeRows(*row_fields))
        acc = accumulator(logits.dtype)
        lse = logits.new_empty((logits.shape[0],), dtype=acc)
        px, py = lse.new_empty((2, *lse.shape)).unbind(0)
        blank, normalization, *_ = options.loss
        outputs = RowLogProbs(px, py, lse)
        log_probs(logits, targets, rows.geometry, 0, blank, normalization, outputs)
        if duration_logits is None:
            py.zero_()
            wide = _blank_log_probs(logits, lse, options.blanks)
        else:
            wide = duration_logits.to(acc)
        total, gx, gy, _, gd = run_tdt_recursion(px, py, wide, rows, options)
        if duration_logits is None:
            # With the symbols in the first column, duration_gradient is that of the blanks.
            wide[:, 0] = torch.log1p(-wide[:, 1:].exp().sum(1).clamp(max=1))
            gd[:, 0] *= 1 + options.loss.fastemit_lambda
        *row_tensors, frames, columns = rows.geometry
        ctx.save_for_backward(logits, wide, targets, lse, gx, gy, gd, *row_tensors)
        ctx.sizes, ctx.options, ctx.blanks = (frames, columns), options.loss, options.blanks
        ctx.dtype = (logits if duration_logits is None else duration_logits).dtype
        return -total

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits, duration_logits, targets, lse, gx, gy, gd, *row_tensors = ctx.saved_tensors
        rows = LatticeRows(*row_tensors, *ctx.sizes)
        upstream = grad_loss.to(lse.dtype).contiguous()
        grad_durations = torch.empty_like(duration_logits, dtype=ctx.dtype)
        duration_gradient(upstream, duration_logits, gd, rows, 0, ctx.options.clamp, grad_durations)
        statistics = RowStatistics(lse, gx, gy)
        arguments = (statistics, targets, rows, ctx.options, ctx.in_place)
        grad_logits = logits_gradient(upstream, logits, *arguments)
        for n, column in enumerate(ctx.blanks, 1):
            grad_logits[:, column] = grad_durations[:, n]
        return grad_logits, None if ctx.blanks else grad_durations, *[None] * 9


@opaque_to_compile
def tdt_row_loss(
    logits_RV: Tensor,
    duration_logits_RK: Tensor | None,
    rows: TdtRows,
    options: TdtLossOptions,
    in_place: bool = False,
) -> Tensor:
    """Loss (N,) acc = -log P of contiguous logits (R,V) and duration_logits (R,K), or None with
    options.blanks.

    in_place writes the gradient of logits over them in the backward pass.
    """
    # Field by field: autograd functions see only tensors that are arguments themselves.
    fields = (rows.targets, *rows.geometry)
    loss: Tensor = _TdtRowLoss.apply(logits_RV, duration_logits_RK, *fields, options, in_place)  # type: ignore[no-untyped-call]
    return loss
