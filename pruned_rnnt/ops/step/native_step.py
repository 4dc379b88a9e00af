"""The pruned step by a compiled library, with the gradients that autograd asks for.

Axes as in pruned_step.py, which is the reference; V' = V rounded up.

Where what reaches the loss will be one number, gradients are computed with the losses, for a 1, and
multiplied by it later: the GPU then does not wait until autograd has found its way back. Not in
float16, whose gradients need the scale of the loss while they are computed. Gradients that reach
the two losses by themselves, and those of a second backward pass, are computed afresh.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import accumulator
from pruned_rnnt.ops.common.native import has_native_kernel
from pruned_rnnt.ops.common.scale import scale
from pruned_rnnt.ops.common.second_derivative import refuses_second_derivative
from pruned_rnnt.ops.common.utterances import Utterances
from pruned_rnnt.ops.step.step_library import (
    Told,
    layer_gradients,
    losses_of,
    rows_backward,
    told_of,
)
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


class _Gradients(NamedTuple):
    """Of the arguments, None for what is not wanted; and the memory that they are views of."""

    of_arguments: list[Tensor | None]
    memory: list[Tensor]


def _gradients(
    inputs: list[Tensor], told: Told, saved: Tensor, sums: Tensor, wanted: Sequence[bool]
) -> _Gradients:
    """What the library makes of `saved` for the arguments' gradients."""
    made = layer_gradients(inputs, told, saved, sums, wanted)
    *results, of_encoder, of_predictor, _ = made
    memory = [x for x in made if x is not None]
    V, D, added = told.sizes.V, told.sizes.D, told.memory.padded_vocabulary - told.sizes.V
    # Cut by one call each: a call takes the host longer than a view.
    cut = (V * D, added * D, V, added, V, added, D, V, added, D)
    weight, _, bias, _, *biases = sums.split_with_sizes(cut)
    am_bias, _, encoder_bias, lm_bias, _, decoder_bias = biases
    parameters: list[Tensor | None] = [None] * (2 * LAYERS)
    parameters[2 * OUTPUT :] = weight.view(V, D), bias
    if of_encoder is not None:
        am, _, encoder = of_encoder.split_with_sizes((V, added, D))
        parameters[2 * AM : 2 * AM + 2] = am, am_bias
        parameters[2 * ENCODER : 2 * ENCODER + 2] = encoder, encoder_bias
    if of_predictor is not None:
        lm, _, decoder = of_predictor.split_with_sizes((V, added, D))
        parameters[2 * LM : 2 * LM + 2] = lm, lm_bias
        parameters[2 * DECODER : 2 * DECODER + 2] = decoder, decoder_bias
    for gradient, like, is_wanted in zip(parameters, inputs[2:], wanted[2:], strict=False):
        if is_wanted and gradient is not None and gradient.dtype != like.dtype:
            gradient = gradient.to(like.dtype)
            memory.append(gradient)
        results.append(gradient if is_wanted else None)
    return _Gradients(results, memory)


class NativeStep(torch.autograd.Function):
    """pruned_step._PrunedStep by the library: the same arguments, results and gradients."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor | None, ...]:
        utterances: Utterances
        plan: StepPlan
        utterances, plan = arguments[INPUTS:]
        wanted, where = ctx.needs_input_grad, utterances[:3]
        # Under no_grad inputs are wanted that will never get a gradient.
        at_once = (
            plan.differentiable
            and any(wanted)
            and plan.reduction != "none"
            and plan.dtype != torch.float16
        )
        packed = utterances.host_lengths is not None
        inputs = [x.contiguous() for x in arguments[:INPUTS]]
        told = told_of(inputs, packed, at_once, plan)
        losses = losses_of(inputs, where, told)
        total, parts, each, gx, gy, start, saved, work, sums = losses
        if sums is None:
            ctx.spent = saved, work
        else:
            # The workspace is given back before more is asked for.
            del losses, work
            # All that the host can do now it need not do in the thread that goes back.
            ctx.spent = _gradients(inputs, told, saved, sums, wanted)
        ctx.save_for_backward(*arguments[:INPUTS], *where, start)
        ctx.told, ctx.plan = told, plan
        ctx.mark_non_differentiable(*(x for x in (gx, gy, start, each) if x is not None))
        ctx.set_materialize_grads(False)
        return total, *parts.unbind(), gx, gy, start, each

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total, simple, pruned = grads[:3]
        if total is None and simple is None and pruned is None:
            return (None,) * (INPUTS + 2)
        if not ctx.told.sizes.at_once or simple is not None or pruned is not None:
            gradients = _gradients_of((total, simple, pruned), ctx)
        else:
            # Spent by the first pass; with retain_graph a second one starts afresh.
            gradients, ctx.spent = ctx.spent, None
            if gradients is None:
                gradients = _gradients_of_one(ctx)
            scale(None, total, gradients.memory)
        return (*gradients.of_arguments, None, None)


def _saved(ctx: Any) -> tuple[list[Tensor], Sequence[Tensor], Tensor]:
    """The inputs, targets and lengths, and the band."""
    *tensors, start = ctx.saved_tensors
    return [x.contiguous() for x in tensors[:INPUTS]], tensors[INPUTS:], start


def _gradients_of_one(ctx: Any) -> _Gradients:
    inputs, where, _ = _saved(ctx)
    losses = losses_of(inputs, where, ctx.told)
    saved, sums = losses.saved, losses.sums
    # The workspace is given back before more is asked for.
    del losses
    assert sums is not None
    return _gradients(inputs, ctx.told, saved, sums, ctx.needs_input_grad)


def _gradients_of(upstream: Sequence[Tensor | None], ctx: Any) -> _Gradients:
    """Gradients for any upstream."""
    inputs, where, start = _saved(ctx)
    told = ctx.told
    kept, ctx.spent = ctx.spent, None
    if told.sizes.at_once or kept is None:
        told = told_of(inputs, told.sizes.packed, False, ctx.plan)
        losses = losses_of(inputs, where, told)
        kept, start = (losses.saved, losses.work), losses.start
        del losses
    saved, work = kept
    sums = saved.new_empty(told.memory.sums, dtype=told.acc)
    contiguous = [None if x is None else x.contiguous() for x in upstream]
    rows_backward(contiguous, where, start, told, saved, work, sums)
    del kept, work
    return _gradients(inputs, told, saved, sums, ctx.needs_input_grad)
