"""Joiner and loss in one: the logits of all nodes are never stored together.

Axes: N batch, T frames, U symbols, S columns kept a frame, D joiner dim, V vocabulary, V' = V
rounded up to a multiple of 8, R rows (row_geometry.py).

logits(row) = act(am(n,t) + lm(n,u)) weight^T + bias. Rows are taken in chunks of whole frames: one
chunk's hidden rows and logits live in a reused workspace, log_probs keeps three numbers a row, and
the backward pass computes the chunk again, turns its logits into gradients where they stand and
adds up the gradients of weight, bias, am and lm, chunk after chunk in one order. Where one chunk
holds everything, its workspace is kept from the forward for the first backward pass. Widths that
are not a multiple of 8 slow a 16-bit matrix product down by more than two times, hence V'.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pruned_rnnt.ops._library import accumulator
from pruned_rnnt.ops.fused_log_probs import fused_log_probs, fused_log_probs_backward
from pruned_rnnt.ops.row_geometry import RowGeometry
from pruned_rnnt.ops.row_loss import LossOptions, run_recursion
from pruned_rnnt.ops.second_derivative import refuses_second_derivative

WORKSPACE_BYTES = 64 << 20
_WIDTH_MULTIPLE = 8


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        am: Tensor,
        lm: Tensor,
        weight: Tensor,
        bias: Tensor,
        targets: Tensor,
        logit_lengths: Tensor,
        target_lengths: Tensor,
        start: Tensor | None,
        row_splits: Tensor | None,
        frames: int,
        columns: int,
        cuts: list[int],
        vocabulary: int,
        activation: int,
        options: LossOptions,
    ) -> Tensor:
        blank, mode, rnnt_type, delay_penalty, fastemit_lambda, clamp = options
        lengths = (logit_lengths, target_lengths)
        geometry = RowGeometry(start, row_splits, frames, columns)
        hidden, logits = _workspace(am, weight, cuts)
        lse = am.new_empty((cuts[-1],), dtype=accumulator(am.dtype))
        px, py = lse.new_empty((2, cuts[-1])).unbind(0)
        chunks = (cuts, vocabulary, blank, mode, activation)
        fused_log_probs(
            am,
            lm,
            weight,
            bias,
            targets,
            *lengths,
            *geometry,
            *chunks,
            hidden,
            logits,
            px,
            py,
            lse,
        )
        total, gx, gy = run_recursion(px, py, *lengths, geometry, rnnt_type, delay_penalty)
        ctx.save_for_backward(
            am, lm, weight, bias, lse, gx, gy, targets, *lengths, start, row_splits
        )
        ctx.chunks = (frames, columns, *chunks, fastemit_lambda, clamp)
        ctx.cuts = cuts
        keeps = len(cuts) == 2 and not torch.compiler.is_compiling()
        ctx.kept = (hidden, logits) if keeps else None
        return -total

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        am, lm, weight, bias, lse = ctx.saved_tensors[:5]
        # The workspace is spent by the first pass; with retain_graph a second one starts afresh.
        kept, ctx.kept = ctx.kept, None
        hidden, logits = _workspace(am, weight, ctx.cuts) if kept is None else kept
        grads = [torch.empty_like(x, dtype=lse.dtype) for x in (am, lm, weight, bias)]
        fused_log_probs_backward(
            grad_loss.to(lse.dtype).contiguous(),
            *ctx.saved_tensors,
            *ctx.chunks,
            kept is not None,
            hidden,
            logits,
            *grads,
        )
        cast = [grad.to(am.dtype) for grad in grads]
        return cast[0], cast[1], cast[2], cast[3], *[None] * 11


def _workspace(am: Tensor, weight: Tensor, cuts: list[int]) -> tuple[Tensor, Tensor]:
    rows = max(end - begin for begin, end in pairwise(cuts))
    return am.new_empty((rows, am.shape[2])), am.new_empty((rows, weight.shape[0]))


def chunk_cuts(rows: int, frame_rows: int, row_bytes: int) -> list[int]:
    """Row numbers that cut `rows` rows, frame_rows a frame, into chunks of WORKSPACE_BYTES."""
    frames_a_chunk = max(1, WORKSPACE_BYTES // (row_bytes * frame_rows))
    return [*range(0, rows, frames_a_chunk * frame_rows), rows]


def ragged_chunk_cuts(frames_N: list[int], widths_N: list[int], row_bytes: int) -> list[int]:
    """The same for packed rows whose frames are widths_N[n] rows wide."""
    limit = max(1, WORKSPACE_BYTES // row_bytes)
    cuts, row = [0], 0
    for frames, width in zip(frames_N, widths_N, strict=True):
        while frames > 0:
            fitting = (cuts[-1] + limit - row) // width
            if fitting < 1 and row > cuts[-1]:
                cuts.append(row)
                continue
            taken = min(max(fitting, 1), frames)
            row += taken * width
            frames -= taken
    return cuts if cuts[-1] == row else [*cuts, row]


def padded_output(weight_VD: Tensor, bias_V: Tensor | None) -> tuple[Tensor, Tensor]:
    """weight and bias (zeros if None) with rows of zeros up to V' (differentiable)."""
    missing = -weight_VD.shape[0] % _WIDTH_MULTIPLE
    if bias_V is None:
        bias_V = weight_VD.new_zeros(weight_VD.shape[0])
    if missing:
        weight_VD, bias_V = pad(weight_VD, (0, 0, 0, missing)), pad(bias_V, (0, missing))
    return weight_VD.contiguous(), bias_V.contiguous()


def fused_loss(
    am_NTD: Tensor,
    lm_NUD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    geometry: RowGeometry,
    cuts: list[int],
    activation: int,
    options: LossOptions,
) -> Tensor:
    """Loss (N,) acc of contiguous am and lm and an output layer, all of one dtype."""
    weight, bias = padded_output(weight_VD, bias_V)
    loss: Tensor = _FusedLoss.apply(  # type: ignore[no-untyped-call]
        am_NTD,
        lm_NUD,
        weight,
        bias,
        targets,
        logit_lengths,
        target_lengths,
        *geometry,
        cuts,
        weight_VD.shape[0],
        activation,
        options,
    )
    return loss
