"""The whole pruned loss, from encoder and predictor outputs to all gradients, as one step.

Axes: N batch, T frames, U symbols, E encoder width, P predictor width, D joiner dim, V vocabulary,
V' = V rounded up, S columns kept a frame, R rows of the band.

A composition of layers and losses takes a hundred launches and half as many nodes of the autograd
graph, each of which a GPU finishes before Python has started the next. The step does the same by
hand:

    am, lm = projections of encoder and predictor to V'     simple loss, occupancy, band
    d am, d lm of the simple loss for a gradient of 1, which take less memory than the tensors from
    which they are computed; the backward pass multiplies them by the gradient of each utterance's
    loss. If the predictor's prior (am_only_scale) couples utterances that may be weighted
    differently, the backward pass computes them instead
    projections of both to D                                row_losses of the band (fused_joiner.py)

The gradient of the encoder is the sum of two products in one
buffer. rnnt_loss_simple, prune_bounds and rnnt_loss_fused compute the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import NEG_INF, accumulator
from pruned_rnnt.ops.common.matrix_products import multiply_into
from pruned_rnnt.ops.common.reduction import reduced
from pruned_rnnt.ops.common.row_geometry import row_offsets
from pruned_rnnt.ops.common.second_derivative import refuses_second_derivative
from pruned_rnnt.ops.common.utterances import TargetsAndLengths, Utterances
from pruned_rnnt.ops.joiner.fused_joiner import row_gradients, row_losses
from pruned_rnnt.ops.joiner.fused_log_probs import JoinerInputs
from pruned_rnnt.ops.joiner.log_probs import RowStatistics
from pruned_rnnt.ops.pruning.prune_bounds import choose_bounds
from pruned_rnnt.ops.simple.simple_log_probs import Upstream
from pruned_rnnt.ops.simple.simple_loss import simple_forward, simple_gradient
from pruned_rnnt.ops.step.linear_layers import Layer, cast_layer, weight_gradients
from pruned_rnnt.ops.step.native_step import NativeStep, takes_native_step
from pruned_rnnt.ops.step.step_plan import StepInputs, StepLosses, StepPlan


class _Layers(NamedTuple):
    am: Layer
    lm: Layer
    encoder: Layer
    decoder: Layer
    output: Layer


def _layers(x: StepInputs, plan: StepPlan) -> _Layers:
    # A prior of the predictor sums over the whole vocabulary, where no columns may be added.
    added = NEG_INF if plan.simple.scales.am_only_scale == 0 else None
    return _Layers(
        Layer(x.am_weight, x.am_bias, added),
        Layer(x.lm_weight, x.lm_bias, added),
        Layer(x.encoder_weight, x.encoder_bias, None),
        Layer(x.decoder_weight, x.decoder_bias, None),
        Layer(x.output_weight, x.output_bias, 0.0),
    )


class _Factors(NamedTuple):
    """The inputs and the weights of the first four layers in the dtype of the products."""

    encoder: Tensor
    predictor: Tensor
    am_weight: Tensor
    lm_weight: Tensor
    encoder_weight: Tensor
    decoder_weight: Tensor


class _SimpleGradients(NamedTuple):
    """The occupancies, and the gradients of am and lm for a gradient of 1, empty where the backward
    pass computes them."""

    emit_occupancy: Tensor
    blank_occupancy: Tensor
    am: Tensor
    lm: Tensor


# Any: the tensors of each are taken from one list, in this order.
_SAVED: tuple[Any, ...] = (StepInputs, _Factors, _SimpleGradients, RowStatistics, JoinerInputs)


def _projected(x_NLI: Tensor, layer: Layer) -> Tensor:
    out = x_NLI.new_empty((*x_NLI.shape[:2], layer.weight.shape[0]))
    flat = out.view(-1, layer.weight.shape[0])
    torch.addmm(layer.bias, x_NLI.flatten(0, 1), layer.weight.t(), out=flat)
    return out


class _PrunedStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor | None, ...]:
        utterances: Utterances
        plan: StepPlan
        *tensors, utterances, plan = arguments
        inputs = StepInputs(*tensors)
        utterances = utterances.on_device()
        batch, row_splits = utterances.tensors, None
        if utterances.host_lengths is not None:
            row_splits = row_offsets(utterances.host_lengths[0].long() * plan.joiner.chunks.columns)
            row_splits = row_splits.to(batch.targets.device, non_blocking=True)
        encoder, predictor = (
            x.to(plan.dtype).contiguous() for x in (inputs.encoder, inputs.predictor)
        )
        cast = _Layers(*(cast_layer(layer, plan.dtype) for layer in _layers(inputs, plan)))
        weights = (cast.am.weight, cast.lm.weight, cast.encoder.weight, cast.decoder.weight)

        am, lm = _projected(encoder, cast.am), _projected(predictor, cast.lm)
        simple_total, gx, gy, state = simple_forward(am, lm, batch, plan.simple)
        S, rnnt_type = plan.joiner.chunks.columns, plan.joiner.options.rnnt_type
        start = choose_bounds(gx, gy, *utterances.lengths, S, rnnt_type, plan.exact_bounds)
        unit_gradients = am[:0], lm[:0]
        ctx.simple_inputs = None
        scales = plan.simple.scales
        if plan.differentiable and scales.am_only_scale != 0 and plan.reduction == "none":
            ctx.simple_inputs = am, lm, state
        elif plan.differentiable:
            upstream = Upstream(torch.ones_like(simple_total), gx, gy)
            unit_gradients = simple_gradient(upstream, am, lm, state, batch, plan.simple)
        del am, lm, state

        am, lm = _projected(encoder, cast.encoder), _projected(predictor, cast.decoder)
        output = (cast.output.weight, cast.output.bias)
        joiner = JoinerInputs(am, lm, *output, *batch, start, row_splits)
        pruned_total, statistics, ctx.workspace = row_losses(joiner, plan.joiner)
        factors = _Factors(encoder, predictor, *weights)
        simple = _SimpleGradients(gx, gy, *unit_gradients)
        ctx.save_for_backward(*inputs, *factors, *simple, *statistics, *joiner)
        ctx.plan = plan
        losses_3N = simple_total.new_empty((3, simple_total.shape[0]))
        torch.neg(simple_total, out=losses_3N[1])
        torch.neg(pruned_total, out=losses_3N[2])
        torch.mul(losses_3N[1], plan.simple_scale, out=losses_3N[0])
        losses_3N[0].add_(losses_3N[2], alpha=plan.pruned_scale)
        utterance_losses = None if plan.reduction == "none" else losses_3N
        losses_3N = reduced(losses_3N, plan.reduction)
        fixed = (gx, gy, start, utterance_losses)
        ctx.mark_non_differentiable(*(x for x in fixed if x is not None))
        ctx.set_materialize_grads(False)
        total, simple_loss, pruned_loss = losses_3N.unbind()
        # A tensor of its own, which may be changed in place.
        return StepLosses(total.clone(), simple_loss, pruned_loss, gx, gy, start, utterance_losses)

    @staticmethod
    @refuses_second_derivative
    def backward(
        ctx: Any, total: Tensor | None, simple: Tensor | None, pruned: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        plan: StepPlan = ctx.plan
        tensors = iter(ctx.saved_tensors)
        inputs, factors, simple_state, statistics, joiner = (
            kind(*islice(tensors, len(kind._fields))) for kind in _SAVED
        )
        layers = _layers(inputs, plan)
        # The first pass takes the workspace; a second one, with retain_graph, computes it anew.
        workspace, ctx.workspace = ctx.workspace, None

        simple_N = _upstream(total, plan.simple_scale, simple, joiner, plan)
        pruned_N = _upstream(total, plan.pruned_scale, pruned, joiner, plan)
        rows = None
        if pruned_N is not None:
            rows = row_gradients(pruned_N, joiner, statistics, plan.joiner, workspace)
        del workspace, statistics
        am, lm = None, None
        if simple_N is not None and ctx.simple_inputs is not None:
            gx, gy, *_ = simple_state
            upstream, (am, lm, state) = Upstream(simple_N, gx, gy), ctx.simple_inputs
            batch = TargetsAndLengths(joiner.targets, joiner.logit_lengths, joiner.target_lengths)
            am, lm = simple_gradient(upstream, am, lm, state, batch, plan.simple)
        elif simple_N is not None:
            factor = simple_N[:, None, None]
            am, lm = (
                torch.mul(unit, factor, out=torch.empty_like(unit))
                for unit in (simple_state.am, simple_state.lm)
            )

        wanted = dict(zip(StepInputs._fields, ctx.needs_input_grad, strict=False))
        joiner_am, joiner_lm = (None, None) if rows is None else (rows.grad_am, rows.grad_lm)
        found: dict[str, Tensor] = {}
        for side, x_NLI, branches in (
            ("encoder", factors.encoder, {"am": am, "encoder": joiner_am}),
            ("predictor", factors.predictor, {"lm": lm, "decoder": joiner_lm}),
        ):
            grads = {
                layer: grad.to(plan.dtype).flatten(0, 1)
                for layer, grad in branches.items()
                if grad is not None
            }
            if wanted[side] and grads:
                weights = [getattr(factors, f"{layer}_weight") for layer in grads]
                found[side] = _input_gradient(grads.values(), weights, getattr(inputs, side))
            for layer, grad_RO in grads.items():
                weight, bias = f"{layer}_weight", f"{layer}_bias"
                if wanted[weight] or wanted[bias]:
                    found[weight], found[bias] = weight_gradients(
                        grad_RO, x_NLI.flatten(0, 1), getattr(layers, layer)
                    )
        if rows is not None:
            V = plan.joiner.chunks.vocabulary
            found["output_weight"] = rows.grad_weight[:V].to(inputs.output_weight.dtype)
            found["output_bias"] = rows.grad_bias[:V].to(inputs.output_bias.dtype)
        return (*map(found.get, StepInputs._fields), None, None)


def _upstream(
    total: Tensor | None, scale: float, own: Tensor | None, joiner: JoinerInputs, plan: StepPlan
) -> Tensor | None:
    """The gradient of each utterance's loss (N,), by way of the total and by itself; None for
    none."""
    batch = joiner.targets.shape[0]
    share = 1 / batch if plan.reduction == "mean" else 1.0
    terms = [
        x.expand(batch) * factor
        for x, factor in ((total, scale * share), (own, share))
        if x is not None
    ]
    return sum(terms[1:], terms[0]).to(accumulator(plan.dtype)) if terms else None


def _input_gradient(grads_RO: Iterable[Tensor], weights: Sequence[Tensor], like: Tensor) -> Tensor:
    """The sum of grad weight over the layers that read one input, in its shape and dtype."""
    total = like.new_empty(like.shape, dtype=torch.promote_types(weights[0].dtype, like.dtype))
    for number, (grad_RO, weight) in enumerate(zip(grads_RO, weights, strict=True)):
        multiply_into(total.view(-1, like.shape[-1]), grad_RO, weight, add=number > 0)
    return total.to(like.dtype)


def pruned_step(inputs: StepInputs, utterances: Utterances, plan: StepPlan) -> StepLosses:
    """Losses that are differentiable in all inputs.

    utterances: lengths on the CPU, or int32 on the step's device.
    """
    function = NativeStep if takes_native_step(inputs, plan) else _PrunedStep
    return StepLosses(*function.apply(*inputs, utterances, plan))  # type: ignore[no-untyped-call]
