"""Joiner and loss in one: the logits of all nodes are never stored together.

Axes: N batch, T frames, U symbols, S columns kept a frame, D joiner dim, V vocabulary, V' = V
rounded up to a multiple of 8, R rows (row_geometry.py).

logits(row) = act(am(n,t) + lm(n,u)) weight^T + bias. Rows are taken in chunks of whole frames: one
chunk's hidden rows and logits live in a reused workspace, log_probs keeps three numbers a row, and
the backward pass computes the chunk again, turns its logits into gradients where they stand and
adds up the gradients of weight, bias, am and lm, from the last chunk, which the workspace kept from
the forward for the first backward pass still holds, to the first. Widths that
are not a multiple of 8 slow a 16-bit matrix product down by more than two times, hence V'.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pruned_rnnt.ops.common.library import accumulator, opaque_to_compile
from pruned_rnnt.ops.common.row_geometry import LatticeRows, RowGeometry
from pruned_rnnt.ops.common.second_derivative import refuses_second_derivative
from pruned_rnnt.ops.joiner.fused_log_probs import fused_log_probs, fused_log_probs_backward
from pruned_rnnt.ops.joiner.log_probs import RowStatistics
from pruned_rnnt.ops.joiner.row_loss import LossOptions, run_recursion

# Of the hidden rows and logits of a chunk.
WORKSPACE_BYTES = 224 << 20
# Of the gradient of hidden rows, which are made a piece of a chunk at a time.
_GRADIENT_BYTES = 24 << 20
_WIDTH_MULTIPLE = 8


class RowPlan(NamedTuple):
    """How rows are worked through: T and S of the geometry, row numbers that cut rows into chunks,
    rows of a piece of the hidden gradient, V, and what the loss is."""

    frames: int
    columns: int
    cuts: list[int]
    hidden_rows: int
    vocabulary: int
    activation: int
    options: LossOptions


class RowProblem(NamedTuple):
    """am (N,T,D), lm (N,U+1,D), weight (V',D), bias (V') of one dtype; where the rows are."""

    am: Tensor
    lm: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor
    logit_lengths: Tensor
    target_lengths: Tensor
    start: Tensor | None
    row_splits: Tensor | None


Workspace = tuple[Tensor, Tensor]


def row_losses(
    problem: RowProblem, plan: RowPlan
) -> tuple[Tensor, RowStatistics, Workspace | None]:
    """log P (N,) acc, and the workspace, which holds the last chunk."""
    am, _, weight = problem[:3]
    blank, mode, rnnt_type, delay_penalty, _, _ = plan.options
    lengths = (problem.logit_lengths, problem.target_lengths)
    geometry = RowGeometry(problem.start, problem.row_splits, plan.frames, plan.columns)
    hidden, logits = _workspace(am, weight, plan.cuts)
    rows = plan.cuts[-1]
    lse, px, py = am.new_empty((3, rows), dtype=accumulator(am.dtype)).unbind(0)
    chunks = (plan.cuts, plan.vocabulary, blank, mode, plan.activation)
    workspace = (hidden, logits)
    fused_log_probs(*problem[:7], *geometry, *chunks, *workspace, px, py, lse)
    sizes = (plan.frames, plan.columns)
    lattice_rows = LatticeRows(*lengths, problem.start, problem.row_splits, *sizes)
    total, gx, gy = run_recursion(px, py, lattice_rows, rnnt_type, delay_penalty)
    kept = None if torch.compiler.is_compiling() else workspace
    return total, RowStatistics(lse, gx, gy), kept


def row_gradients(
    grad_loss: Tensor,
    problem: RowProblem,
    statistics: RowStatistics,
    plan: RowPlan,
    kept: Workspace | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of am (in its dtype), lm, weight and bias (acc), for grad_loss (N,) acc."""
    am, lm, weight, bias = problem[:4]
    acc = statistics.lse.dtype
    hidden, logits = _workspace(am, weight, plan.cuts) if kept is None else kept
    grads = (
        torch.empty_like(am),
        torch.empty_like(lm, dtype=acc),
        torch.empty_like(weight, dtype=acc),
        torch.empty_like(bias, dtype=acc),
    )
    blank, mode, _, _, fastemit_lambda, clamp = plan.options
    fused_log_probs_backward(
        grad_loss,
        *problem[:4],
        *statistics,
        *problem[4:],
        plan.frames,
        plan.columns,
        plan.cuts,
        plan.vocabulary,
        blank,
        mode,
        plan.activation,
        fastemit_lambda,
        clamp,
        kept is not None,
        plan.hidden_rows,
        hidden,
        logits,
        *grads,
    )
    return grads


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, plan = arguments
        problem = RowProblem(*tensors)
        total, statistics, ctx.kept = row_losses(problem, plan)
        ctx.save_for_backward(*problem, *statistics)
        ctx.plan = plan
        return -total

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        problem = RowProblem(*ctx.saved_tensors[:9])
        statistics = RowStatistics(*ctx.saved_tensors[9:])
        # The workspace is spent by the first pass; with retain_graph a second one starts afresh.
        kept, ctx.kept = ctx.kept, None
        upstream = grad_loss.to(statistics.lse.dtype).contiguous()
        grads = row_gradients(upstream, problem, statistics, ctx.plan, kept)
        cast = [grad.to(problem.am.dtype) for grad in grads]
        return cast[0], cast[1], cast[2], cast[3], *[None] * 6


def _workspace(am: Tensor, weight: Tensor, cuts: list[int]) -> Workspace:
    rows = max(end - begin for begin, end in pairwise(cuts))
    return am.new_empty((rows, am.shape[2])), am.new_empty((rows, weight.shape[0]))


def row_plan(
    geometry: RowGeometry,
    rows: int,
    row_bytes: int,
    hidden_bytes: int,
    ragged: tuple[Tensor, Tensor] | None,
    vocabulary: int,
    activation: int,
    options: LossOptions,
) -> RowPlan:
    """Cuts rows by the bytes that a row of logits and of hidden takes.

    ragged: the lengths on the host where rows are a packed whole lattice, so that frames differ in
    their number of rows.
    """
    columns = geometry.columns
    if ragged is None:
        cuts = chunk_cuts(rows, columns, row_bytes + hidden_bytes)
        hidden_rows = max(1, _GRADIENT_BYTES // (hidden_bytes * columns)) * columns
    else:
        frames_N, symbols_N = ragged
        widths_N = (symbols_N + 1).tolist()
        cuts = ragged_chunk_cuts(frames_N.tolist(), widths_N, row_bytes + hidden_bytes)
        hidden_rows = rows
    return RowPlan(geometry.frames, columns, cuts, hidden_rows, vocabulary, activation, options)


def chunk_cuts(rows: int, frame_rows: int, row_bytes: int) -> list[int]:
    """Row numbers that cut `rows` rows, frame_rows a frame, into even chunks of WORKSPACE_BYTES."""
    frames = rows // frame_rows
    most = max(1, WORKSPACE_BYTES // (row_bytes * frame_rows))
    each = -(-frames // -(-frames // most))
    return [*range(0, rows, each * frame_rows), rows]


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


@opaque_to_compile
def fused_loss(problem: RowProblem, plan: RowPlan) -> Tensor:
    """Loss (N,) acc, differentiable in am, lm, weight and bias."""
    loss: Tensor = _FusedLoss.apply(*problem, plan)  # type: ignore[no-untyped-call]
    return loss
