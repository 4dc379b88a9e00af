"""Joiner and TDT loss in one: fused_joiner.py with a recursion over durations.

The output layers of tokens and durations are one matrix of V + K rows, so that one product makes
both logits of a chunk. Duration logits are few, and stored for all rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.autograd import refuses_second_derivative
from pruned_rnnt.ops.common.library import accumulator
from pruned_rnnt.ops.common.opaque import opaque_to_compile
from pruned_rnnt.ops.common.utterances import Utterances
from pruned_rnnt.ops.joiner.fused_joiner import input_gradients, planned_joiner, scored_rows
from pruned_rnnt.ops.joiner.fused_log_probs import DurationRows, JoinerInputs, JoinerPlan
from pruned_rnnt.ops.joiner.log_probs import RowStatistics
from pruned_rnnt.ops.joiner.tdt_row_loss import TdtLossOptions, TdtRows, run_tdt_recursion


class OutputLayers(NamedTuple):
    """weight (V,D) and bias (V) or None of tokens, and (K,D), (K) or None of durations."""

    weight: Tensor
    bias: Tensor | None
    duration_weight: Tensor
    duration_bias: Tensor | None

    def joined(self) -> tuple[Tensor, Tensor]:
        """weight (V+K,D) and bias (V+K)."""
        weights = (self.weight, self.duration_weight)
        biases = (self.bias, self.duration_bias)
        filled = [
            weight.new_zeros(weight.shape[0]) if bias is None else bias
            for weight, bias in zip(weights, biases, strict=True)
        ]
        return torch.cat(weights), torch.cat(filled)


class _FusedTdtLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, ctx.plan, options = arguments
        inputs, plan = JoinerInputs(*tensors), ctx.plan
        shape, acc = (plan.rows, len(options.lattice.durations)), accumulator(inputs.am.dtype)
        duration_logits = inputs.am.new_empty(shape, dtype=acc)
        px, py, lse = scored_rows(ctx, inputs, duration_logits)
        rows = TdtRows(inputs.targets, plan.lattice_rows(inputs))
        sums = run_tdt_recursion(px, py, duration_logits, rows, options)
        statistics = (lse, sums.gx, sums.gy, duration_logits, sums.gd)
        ctx.save_for_backward(*tensors, *statistics)
        return -sums.total

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, lse, gx, gy, duration_logits, gd = ctx.saved_tensors
        inputs, statistics = JoinerInputs(*tensors), RowStatistics(lse, gx, gy)
        durations = DurationRows(duration_logits, gd)
        return *input_gradients(ctx, grad_loss, inputs, statistics, durations), *[None] * 7


@opaque_to_compile
def _fused_tdt_loss(inputs: JoinerInputs, plan: JoinerPlan, options: TdtLossOptions) -> Tensor:
    loss: Tensor = _FusedTdtLoss.apply(*inputs, plan, options)  # type: ignore[no-untyped-call]
    return loss


def tdt_joiner_loss(
    am: Tensor,
    lm: Tensor,
    layers: OutputLayers,
    utterances: Utterances,
    *,
    start: Tensor | None,
    columns: int,
    activation: int,
    options: TdtLossOptions,
) -> Tensor:
    """Loss (N,) acc, differentiable in am (N,T,D), lm (N,U+1,D) and the output layers.

    start (N,T): of a band of that many columns, None for the whole lattice.
    """
    inputs, plan, _ = planned_joiner(
        am,
        lm,
        *layers.joined(),
        utterances,
        start=start,
        columns=columns,
        vocabulary=layers.weight.shape[0],
        activation=activation,
        options=options.loss,
    )
    return _fused_tdt_loss(inputs, plan, options)
