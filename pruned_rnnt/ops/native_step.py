"""The pruned step by a compiled library, with the gradients that autograd asks for.

Axes as in pruned_step.py, which is the reference; V' = V rounded up.

Where what reaches the loss will be one number, gradients are computed with the losses, for a 1, and
multiplied by it later: the GPU then does not wait until autograd has found its way back. Not in
float16, whose gradients need the scale of the loss while they are computed. Gradients that reach
the two losses by themselves, and those of a second backward pass, are computed afresh.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pruned_rnnt.ops._library import accumulator
from pruned_rnnt.ops._native import has_native_kernel
from pruned_rnnt.ops.scale import scale
from pruned_rnnt.ops.second_derivative import refuses_second_derivative
from pruned_rnnt.ops.step_library import (
    Told,
    layer_gradients,
    losses_of,
    rows_backward,
    told_of,
)
from pruned_rnnt.ops.step_plan import AM, DECODER, ENCODER, INPUTS, LM, OUTPUT, StepPlan
from pruned_rnnt.ops.utterances import Utterances


def takes_native_step(inputs: tuple[Tensor, ...], plan: StepPlan) -> bool:
    """Whether the library has the step for these inputs and layers.

    A prior of the predictor (am_only_scale) it does not have; gradients are written in the dtype
    of the products or in float32, of the first four weights in one dtype.
    """
    return (
        inputs[0].is_cuda
        and has_native_kernel("pruned_step_forward", "cuda")
        and plan.simple.am_only_scale == 0
        and all(x.dtype in (plan.dtype, accumulator(plan.dtype)) for x in inputs)
        and all(inputs[2 + 2 * i].dtype == inputs[2].dtype for i in range(OUTPUT))
    )


def _of_arguments(
    gradients: list[Tensor | None],
    dtypes: Sequence[torch.dtype],
    told: Told,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """What layer_gradients returns as gradients of the arguments: views, cast where need be."""
    *sides, of_encoder, of_predictor, sums = gradients
    assert sums is not None
    V, D, added = told.sizes.V, told.sizes.D, told.memory.padded_vocabulary - told.sizes.V
    cut = [V * D, added * D, V, added, V, added, D, V, added, D]
    weight, _, output_bias, _, am_bias, _, encoder_bias, lm_bias, _, decoder_bias = sums.split(cut)
    pairs = {OUTPUT: (weight.view(V, D), output_bias)}
    if of_encoder is not None:
        am_weight, _, encoder_weight = of_encoder.split([V, added, D])
        pairs[AM], pairs[ENCODER] = (am_weight, am_bias), (encoder_weight, encoder_bias)
    if of_predictor is not None:
        lm_weight, _, decoder_weight = of_predictor.split([V, added, D])
        pairs[LM], pairs[DECODER] = (lm_weight, lm_bias), (decoder_weight, decoder_bias)
    results = [*sides, *[None] * len(dtypes)]
    for layer, pair in pairs.items():
        for i, view in enumerate(pair, 2 * layer):
            if wanted[2 + i]:
                results[2 + i] = view if view.dtype == dtypes[i] else view.to(dtypes[i])
    return results


class NativeStep(torch.autograd.Function):
    """pruned_step._PrunedStep by the library: the same arguments, results and gradients."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        utterances: Utterances
        plan: StepPlan
        utterances, plan = arguments[INPUTS:]
        wanted, where = ctx.needs_input_grad, utterances[:3]
        at_once = plan.reduction != "none" and plan.dtype != torch.float16 and any(wanted)
        packed, acc = utterances.host_lengths is not None, accumulator(plan.dtype)
        inputs = [x.contiguous() for x in arguments[:INPUTS]]
        told = told_of(inputs, packed, at_once, plan)
        losses = losses_of(inputs, where, told, acc)
        total, parts, gx, gy, start, saved, work, sums = losses
        if sums is None:
            ctx.spent = saved, work
        else:
            # The workspace is given back before more is asked for.
            del losses, work
            ctx.spent = layer_gradients(inputs, told, saved, sums, wanted)
        ctx.save_for_backward(*arguments[:INPUTS], *where, start)
        ctx.told, ctx.plan, ctx.dtypes = told, plan, [x.dtype for x in inputs[2:]]
        ctx.mark_non_differentiable(gx, gy, start)
        ctx.set_materialize_grads(False)
        return total, *parts.unbind(), gx, gy, start

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted, told = ctx.needs_input_grad, ctx.told
        acc = accumulator(ctx.plan.dtype)
        upstream = [None if x is None else x.to(acc).contiguous() for x in grads[:3]]
        if all(x is None for x in upstream):
            return (None,) * len(wanted)
        if told.sizes.at_once and upstream[1] is None and upstream[2] is None:
            # Spent by the first pass; with retain_graph a second one starts afresh.
            gradients, ctx.spent = ctx.spent, None
            if gradients is None:
                gradients = _gradients_of_one(ctx, acc)
            present = [x for x in gradients if x is not None]
            scale(present, upstream[0], present)
        else:
            gradients = _gradients_of(upstream, ctx, acc)
        return (*_of_arguments(gradients, ctx.dtypes, told, wanted), None, None)


def _saved(ctx: Any) -> tuple[list[Tensor], Sequence[Tensor], Tensor]:
    """The inputs, targets and lengths, and the band."""
    *tensors, start = ctx.saved_tensors
    return [x.contiguous() for x in tensors[:INPUTS]], tensors[INPUTS:], start


def _gradients_of_one(ctx: Any, acc: torch.dtype) -> list[Tensor | None]:
    inputs, where, _ = _saved(ctx)
    losses = losses_of(inputs, where, ctx.told, acc)
    saved, sums = losses.saved, losses.sums
    # The workspace is given back before more is asked for.
    del losses
    assert sums is not None
    return layer_gradients(inputs, ctx.told, saved, sums, ctx.needs_input_grad)


def _gradients_of(upstream: list[Tensor | None], ctx: Any, acc: torch.dtype) -> list[Tensor | None]:
    """Gradients for any upstream."""
    inputs, where, start = _saved(ctx)
    told = ctx.told
    kept, ctx.spent = ctx.spent, None
    if told.sizes.at_once or kept is None:
        told = told_of(inputs, told.sizes.packed, False, ctx.plan)
        losses = losses_of(inputs, where, told, acc)
        kept, start = (losses.saved, losses.work), losses.start
        del losses
    saved, work = kept
    sums = saved.new_empty(told.memory.sums, dtype=acc)
    rows_backward(upstream, where, start, told, saved, work, sums)
    del kept, work
    return layer_gradients(inputs, told, saved, sums, ctx.needs_input_grad)
