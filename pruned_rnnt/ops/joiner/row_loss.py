"""The loss of logits kept as rows: log_probs and band_lattice forward, log_probs_backward back.

Axes: N batch, T frames, U symbols, S columns kept a frame, V vocabulary, R rows
(row_geometry.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import accumulator, opaque_to_compile
from pruned_rnnt.ops.common.row_geometry import RowGeometry
from pruned_rnnt.ops.common.second_derivative import refuses_second_derivative
from pruned_rnnt.ops.joiner.log_probs import log_probs, log_probs_backward
from pruned_rnnt.ops.lattice.band_lattice import band_lattice
from pruned_rnnt.ops.lattice.lattice import cut_memory


class LossOptions(NamedTuple):
    """What the recursion and its gradient depend on beside tensors.

    blank: 0..V-1. mode: log_probs.LOGITS, LOG_PROBS or HAT. rnnt_type: as in library.RNNT_TYPES.
    clamp: 0.0 for none.
    """

    blank: int
    mode: int
    rnnt_type: int
    delay_penalty: float
    fastemit_lambda: float
    clamp: float


class Recursion(NamedTuple):
    """total (N,) = log P and occupancies gx, gy (R,)."""

    total: Tensor
    gx: Tensor
    gy: Tensor


def run_recursion(
    px: Tensor,
    py: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    geometry: RowGeometry,
    rnnt_type: int,
    delay_penalty: float,
) -> Recursion:
    """band_lattice with outputs of its own, for px and py of any shape with R elements."""
    gx, gy = px.new_empty((2, *px.shape)).unbind(0)
    batch = logit_lengths.shape[0]
    total = px.new_empty((batch,))
    band_lattice(
        px.view(-1),
        py.view(-1),
        logit_lengths,
        target_lengths,
        *geometry,
        rnnt_type,
        delay_penalty,
        cut_memory(px, batch, geometry.columns, geometry.frames),
        total,
        gx.view(-1),
        gy.view(-1),
    )
    return Recursion(total, gx, gy)


class _RowLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        logit_lengths: Tensor,
        target_lengths: Tensor,
        start: Tensor | None,
        row_splits: Tensor | None,
        frames: int,
        columns: int,
        options: LossOptions,
        in_place: bool,
    ) -> Tensor:
        blank, mode, rnnt_type, delay_penalty, fastemit_lambda, clamp = options
        lse = logits.new_empty((logits.shape[0],), dtype=accumulator(logits.dtype))
        px, py = lse.new_empty((2, *lse.shape)).unbind(0)
        geometry = RowGeometry(start, row_splits, frames, columns)
        lengths = (logit_lengths, target_lengths)
        log_probs(logits, targets, *lengths, *geometry, 0, blank, mode, px, py, lse)
        total, gx, gy = run_recursion(px, py, *lengths, geometry, rnnt_type, delay_penalty)
        ctx.save_for_backward(
            logits, lse, gx, gy, targets, logit_lengths, target_lengths, start, row_splits
        )
        ctx.scalars = (frames, columns, 0, blank, mode, fastemit_lambda, clamp)
        ctx.in_place = in_place
        return -total

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits, lse, gx, gy, targets, logit_lengths, target_lengths, start, row_splits = (
            ctx.saved_tensors
        )
        in_place = ctx.in_place and not torch.compiler.is_compiling()
        grad_logits = logits.detach() if in_place else torch.empty_like(logits)
        log_probs_backward(
            grad_loss.to(lse.dtype).contiguous(),
            logits,
            lse,
            gx,
            gy,
            targets,
            logit_lengths,
            target_lengths,
            start,
            row_splits,
            *ctx.scalars,
            grad_logits,
        )
        if in_place:
            # A second backward pass, or another user of the logits, now gets torch's error.
            torch.autograd.graph.increment_version(logits)
        return grad_logits, *[None] * 9


@opaque_to_compile
def row_loss(
    logits_RV: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    geometry: RowGeometry,
    options: LossOptions,
    in_place: bool = False,
) -> Tensor:
    """Loss (N,) acc = -log P of contiguous logits (R,V).

    in_place writes the gradient over the logits in the backward pass.
    """
    loss: Tensor = _RowLoss.apply(  # type: ignore[no-untyped-call]
        logits_RV,
        targets,
        logit_lengths,
        target_lengths,
        *geometry,
        options,
        in_place,
    )
    return loss
