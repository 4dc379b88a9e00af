"""The whole pruned loss, from encoder and predictor outputs to all gradients, as one step.

Axes: N batch, T frames, U symbols, E encoder width, P predictor width, D joiner dim, V vocabulary,
V' = V rounded up, S columns kept a frame, R rows of the band.

What a composition of layers and losses would do in a hundred launches and half as many nodes of the
autograd graph is done by hand here, because a GPU finishes each before Python has started the next:

    am, lm = projections of encoder and predictor to V'     simple loss, occupancy, band
    d am, d lm of the simple loss for a gradient of 1, which take less memory than what they are
    made from; the backward pass multiplies them by the gradient of each utterance's loss. Where the
    predictor's prior (am_only_scale) couples utterances that may be weighted differently, the
    backward pass makes them instead, from what the losses have kept
    projections of both to D                                row_losses of the band (fused_joiner.py)

Weights are cast and padded together; the gradient of the encoder is the sum of two products in one
buffer. The same functions compute the same numbers in the composition of rnnt_loss_simple,
prune_bounds and rnnt_loss_fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import NEG_INF, accumulator
from pruned_rnnt.ops.common.matrix_products import multiply_into
from pruned_rnnt.ops.common.row_geometry import row_offsets
from pruned_rnnt.ops.common.second_derivative import refuses_second_derivative
from pruned_rnnt.ops.common.utterances import Utterances
from pruned_rnnt.ops.joiner.fused_joiner import (
    RowProblem,
    row_gradients,
    row_losses,
)
from pruned_rnnt.ops.joiner.log_probs import RowStatistics
from pruned_rnnt.ops.pruning.prune_bounds import choose_bounds
from pruned_rnnt.ops.simple.simple_loss import (
    SimpleOptions,
    simple_gradient,
    simple_joiner_log_probs,
    simple_recursion,
)
from pruned_rnnt.ops.step.linear_layers import Layer, cast_layers, weight_gradients
from pruned_rnnt.ops.step.native_step import NativeStep, takes_native_step
from pruned_rnnt.ops.step.step_plan import (
    AM,
    DECODER,
    ENCODER,
    INPUTS,
    LAYERS,
    LM,
    OUTPUT,
    StepPlan,
)


class StepLosses(NamedTuple):
    """total = simple_scale simple + pruned_scale pruned, all three (N,) or (); the occupancies
    (N,T,U+1) and band (N,T) on the way, and where the losses are reduced those of each utterance
    (3,N), in the same order, without gradients."""

    total: Tensor
    simple: Tensor
    pruned: Tensor
    gx: Tensor
    gy: Tensor
    start: Tensor
    each: Tensor | None


def _layers(tensors: Sequence[Tensor], plan: StepPlan) -> list[Layer]:
    # A prior of the predictor sums over the whole vocabulary, where no columns may be added.
    added = NEG_INF if plan.simple.am_only_scale == 0 else None
    padding = [added, added, None, None, 0.0]
    return [Layer(tensors[2 * i], tensors[2 * i + 1], padding[i]) for i in range(LAYERS)]


def _projected(x_NLI: Tensor, layer: tuple[Tensor, Tensor]) -> Tensor:
    weight, bias = layer
    out = x_NLI.new_empty((*x_NLI.shape[:2], weight.shape[0]))
    torch.addmm(bias, x_NLI.flatten(0, 1), weight.t(), out=out.view(-1, weight.shape[0]))
    return out


class _PrunedStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor | None, ...]:
        encoder_NTE, predictor_NUP = arguments[:2]
        layers = _layers(arguments[2:INPUTS], arguments[-1])
        utterances: Utterances
        utterances, plan = arguments[INPUTS:]
        targets, logit_lengths, target_lengths, host_lengths = utterances.on_device()
        lengths = (logit_lengths, target_lengths)
        row_splits = None
        if host_lengths is not None:
            row_splits = row_offsets(host_lengths[0].long() * plan.rows.columns)
            row_splits = row_splits.to(targets.device, non_blocking=True)
        plan_simple: SimpleOptions = plan.simple
        encoder, predictor = (x.to(plan.dtype).contiguous() for x in (encoder_NTE, predictor_NUP))
        cast = cast_layers(layers, plan.dtype)

        am, lm = _projected(encoder, cast[AM]), _projected(predictor, cast[LM])
        parts = simple_joiner_log_probs(am, lm, targets, *lengths, plan_simple)
        simple_total, gx, gy = simple_recursion(parts, *lengths, plan_simple)
        start = choose_bounds(
            gx, gy, *lengths, plan.rows.columns, plan_simple.rnnt_type, plan.exact_bounds
        )
        unit = am[:0], lm[:0]
        ctx.simple_inputs = None
        if plan.differentiable and plan.simple.am_only_scale != 0 and plan.reduction == "none":
            ctx.simple_inputs = am, lm, parts
        elif plan.differentiable:
            ones = torch.ones_like(simple_total)
            unit = simple_gradient(ones, gx, gy, am, lm, parts, targets, *lengths, plan_simple)
        del am, lm, parts

        problem = RowProblem(
            _projected(encoder, cast[ENCODER]),
            _projected(predictor, cast[DECODER]),
            *cast[OUTPUT],
            targets,
            *lengths,
            start,
            row_splits,
        )
        pruned_total, statistics, ctx.kept = row_losses(problem, plan.rows)
        ctx.save_for_backward(
            encoder,
            predictor,
            *(weight for weight, _ in cast[:OUTPUT]),
            *unit,
            *statistics,
            *problem,
            *arguments[:INPUTS],
            gx,
            gy,
        )
        ctx.plan = plan
        losses_3N = simple_total.new_empty((3, simple_total.shape[0]))
        torch.neg(simple_total, out=losses_3N[1])
        torch.neg(pruned_total, out=losses_3N[2])
        torch.mul(losses_3N[1], plan.simple_scale, out=losses_3N[0])
        losses_3N[0].add_(losses_3N[2], alpha=plan.pruned_scale)
        each = None if plan.reduction == "none" else losses_3N
        if plan.reduction == "mean":
            losses_3N = losses_3N.mean(1)
        elif plan.reduction == "sum":
            losses_3N = losses_3N.sum(1)
        ctx.mark_non_differentiable(*(x for x in (gx, gy, start, each) if x is not None))
        ctx.set_materialize_grads(False)
        # A tensor of its own, which may be changed in place.
        return (losses_3N[0].clone(), losses_3N[1], losses_3N[2], gx, gy, start, each)

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plan: StepPlan = ctx.plan
        saved = ctx.saved_tensors
        encoder, predictor, am_weight, lm_weight, encoder_weight, decoder_weight = saved[:6]
        unit_am, unit_lm = saved[6:8]
        statistics, problem = RowStatistics(*saved[8:11]), RowProblem(*saved[11:20])
        inputs = saved[20 : 20 + INPUTS]
        layers = _layers(inputs[2:], plan)
        # The workspace is spent by the first pass; with retain_graph a second one starts afresh.
        kept, ctx.kept = ctx.kept, None

        batch = problem.targets.shape[0]
        simple_N, pruned_N = (
            _upstream(grads[0], scale, own, batch, plan, accumulator(plan.dtype))
            for scale, own in ((plan.simple_scale, grads[1]), (plan.pruned_scale, grads[2]))
        )
        where = problem.targets, problem.logit_lengths, problem.target_lengths
        row_grads: Sequence[Tensor | None] = (None, None, None, None)
        if pruned_N is not None:
            row_grads = row_gradients(pruned_N, problem, statistics, plan.rows, kept)
        del kept, problem, statistics
        am_grads: Sequence[Tensor | None] = (None, None)
        if simple_N is not None and ctx.simple_inputs is not None:
            am, lm, parts = ctx.simple_inputs
            gx, gy = saved[20 + INPUTS :]
            am_grads = simple_gradient(simple_N, gx, gy, am, lm, parts, *where, plan.simple)
        elif simple_N is not None:
            factor = simple_N[:, None, None]
            am_grads = tuple(
                torch.mul(unit, factor, out=torch.empty_like(unit)) for unit in (unit_am, unit_lm)
            )

        wanted = ctx.needs_input_grad
        results: list[Tensor | None] = [None] * (INPUTS)
        sides = (
            (0, encoder, ((AM, am_grads[0], am_weight), (ENCODER, row_grads[0], encoder_weight))),
            (1, predictor, ((LM, am_grads[1], lm_weight), (DECODER, row_grads[1], decoder_weight))),
        )
        for side, x_NLI, branches in sides:
            x_RI = x_NLI.flatten(0, 1)
            flat = [
                (layer, grad.to(plan.dtype).flatten(0, 1), weight)
                for layer, grad, weight in branches
                if grad is not None
            ]
            if wanted[side] and flat:
                results[side] = _input_gradient(flat, inputs[side])
            for layer, grad_RO, _ in flat:
                first = 2 + 2 * layer
                if wanted[first] or wanted[first + 1]:
                    results[first : first + 2] = weight_gradients(grad_RO, x_RI, layers[layer])
        first = 2 + 2 * OUTPUT
        for at, grad in ((first, row_grads[2]), (first + 1, row_grads[3])):
            if grad is not None and wanted[at]:
                size = inputs[at].shape[0]
                results[at] = grad[:size].to(inputs[at].dtype)
        return (*results, None, None)


def _upstream(
    total: Tensor | None,
    scale: float,
    own: Tensor | None,
    batch: int,
    plan: StepPlan,
    dtype: torch.dtype,
) -> Tensor | None:
    """What reaches each utterance of one loss, (N,): by the total, and by itself; None for
    nothing."""
    share = 1 / batch if plan.reduction == "mean" else 1.0
    parts = ((total, scale * share), (own, share))
    terms = [x.expand(batch) * factor for x, factor in parts if x is not None]
    if not terms:
        return None
    return (terms[0] if len(terms) == 1 else terms[0] + terms[1]).to(dtype)


def _input_gradient(branches: list[tuple[int, Tensor, Tensor]], like: Tensor) -> Tensor:
    """The sum of grad weight over the layers that read one input, in its shape and dtype."""
    dtype = torch.promote_types(branches[0][1].dtype, like.dtype)
    total = like.new_empty(like.shape, dtype=dtype)
    for number, (_, grad_RO, weight) in enumerate(branches):
        multiply_into(total.view(-1, like.shape[-1]), grad_RO, weight, add=number > 0)
    return total.to(like.dtype)


def pruned_step(
    encoder_NTE: Tensor,
    predictor_NUP: Tensor,
    layers: list[Tensor],
    utterances: Utterances,
    plan: StepPlan,
) -> StepLosses:
    """Losses that are differentiable in both inputs and in all layers.

    layers: weight and bias of the projections of am, lm, encoder and predictor, and of the output
    layer. utterances: lengths on the CPU, or int32 on the step's device.
    """
    inputs = (encoder_NTE, predictor_NUP, *layers)
    function = NativeStep if takes_native_step(inputs, plan) else _PrunedStep
    return StepLosses(*function.apply(*inputs, utterances, plan))  # type: ignore[no-untyped-call]
