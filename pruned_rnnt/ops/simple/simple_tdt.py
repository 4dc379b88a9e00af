"""The TDT loss of the trivial joiner, whose duration logits are sums, too.

Tokens are normalised by a matrix product (simple_log_probs.py); duration logits am(t) + lm(u) are
few, and stored for all nodes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.autograd import refuses_second_derivative, with_occupancies
from pruned_rnnt.ops.common.library import accumulator
from pruned_rnnt.ops.common.opaque import opaque_to_compile
from pruned_rnnt.ops.common.utterances import TargetsAndLengths
from pruned_rnnt.ops.joiner.duration_gradient import duration_gradient
from pruned_rnnt.ops.joiner.tdt_row_loss import TdtLossOptions, TdtRows, run_tdt_recursion
from pruned_rnnt.ops.simple.simple_log_probs import Upstream
from pruned_rnnt.ops.simple.simple_loss import (
    SimpleOptions,
    SimpleState,
    simple_gradient,
    simple_scores,
    whole_lattices,
)


class SimpleTdtInputs(NamedTuple):
    """am (N,T,V), lm (N,U+1,V), duration_am (N,T,K), duration_lm (N,U+1,K), contiguous and of one
    dtype."""

    am: Tensor
    lm: Tensor
    duration_am: Tensor
    duration_lm: Tensor


class SimpleTdtResults(NamedTuple):
    """loss (N,), differentiable; occupancies gx, gy, stay (N,T,U+1) and gd (N,T,U+1,K), which are
    not; all acc."""

    loss: Tensor
    gx: Tensor
    gy: Tensor
    stay: Tensor
    gd: Tensor


class _SimpleTdtLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        am, lm, duration_am, duration_lm, *batch_of, ctx.options, recursion = arguments
        batch = TargetsAndLengths(*batch_of)
        acc = accumulator(am.dtype)
        scores, state = simple_scores(am, lm, batch, ctx.options)
        logits = duration_am.to(acc)[:, :, None] + duration_lm.to(acc)[:, None]
        rows = TdtRows(batch.targets, whole_lattices(am, lm, batch))
        sums = run_tdt_recursion(scores.px, scores.py, logits, rows, recursion)
        tensors = (am, lm, logits, sums.gx, sums.gy, sums.gd)
        ctx.save_for_backward(*tensors, *batch, *state.tensors())
        # A copy where the RNN-T recursion has returned gx for both.
        stay = sums.stay.clone() if sums.stay is sums.gx else sums.stay
        return with_occupancies(ctx, -sums.total, sums.gx, sums.gy, stay, sums.gd)

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        am, lm, logits, gx, gy, gd, *saved = ctx.saved_tensors
        batch, state = TargetsAndLengths(*saved[:3]), SimpleState.of(saved[3:])
        upstream = Upstream(grad_loss.to(gx.dtype).contiguous(), gx, gy)
        grads = simple_gradient(upstream, am, lm, state, batch, ctx.options)
        rows = whole_lattices(am, lm, batch)
        unit = torch.empty_like(logits)
        flat = [x.view(-1, logits.shape[3]) for x in (logits, gd, unit)]
        duration_gradient(upstream.grad_loss, flat[0], flat[1], rows, 0, 0.0, flat[2])
        by_duration = [unit.sum(axis).to(am.dtype) for axis in (2, 1)]
        return *grads, *by_duration, *[None] * 5


@opaque_to_compile
def simple_tdt_loss(
    inputs: SimpleTdtInputs,
    batch: TargetsAndLengths,
    options: SimpleOptions,
    recursion: TdtLossOptions,
) -> SimpleTdtResults:
    """The TDT loss of am(t) + lm(u), with its occupancies."""
    return SimpleTdtResults(*_SimpleTdtLoss.apply(*inputs, *batch, options, recursion))  # type: ignore[no-untyped-call]
