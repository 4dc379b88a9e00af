"""The whole pruned loss, from encoder and predictor outputs to all gradients, as one compiled step.

A composition of layers and losses takes a hundred launches and half as many nodes of the autograd
graph, each of which a GPU finishes before Python has started the next. The step computes the same
numbers in one call of the CUDA library. The composition is in
pruned_rnnt/loss/composed_losses.py, and serves all other devices and layers.

If the losses are reduced, their gradients are computed during forward, for an upstream gradient of
1, and backward multiplies them by the gradient of the total: the GPU then does not wait until
autograd has found its way back. Gradients that reach the simple or the pruned loss by itself, and
those of a second backward pass, are computed anew. Gradients in float16 need the scale of the loss
while they are computed: the composition serves them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.autograd import refuses_second_derivative, scale
from pruned_rnnt.ops.common.library import accumulator
from pruned_rnnt.ops.common.utterances import Utterances
from pruned_rnnt.ops.step.step_library import (
    StepBuffers,
    StepCall,
    StepInputs,
    StepLosses,
    StepPlan,
    forward,
    layers_backward,
    rows_backward,
)


def has_dtypes_of_step(inputs: StepInputs, dtype: torch.dtype) -> bool:
    """Whether the step takes these inputs for products in that dtype: it writes gradients in the
    dtype of the products or in float32, those of the first four weights in one dtype."""
    weights = [inputs.lm_weight, inputs.encoder_weight, inputs.decoder_weight]
    weights += [x for x in (inputs.duration_am_weight, inputs.duration_lm_weight) if x is not None]
    return all(x.dtype in (dtype, accumulator(dtype)) for x in inputs.given) and all(
        x.dtype == inputs.am_weight.dtype for x in weights
    )


class _Gradients(NamedTuple):
    """For each of the inputs, None for what is not wanted; and the memory that they are views
    of."""

    of_inputs: list[Tensor | None]
    memory: list[Tensor]


def _contiguous(tensors: Sequence[Any]) -> StepInputs:
    found: list[Any] = [x if x is None else x.contiguous() for x in tensors]
    return StepInputs(*found)


def _gradients(
    inputs: StepInputs, call: StepCall, saved: Tensor, sums: Tensor, wanted: Mapping[str, bool]
) -> _Gradients:
    made = layers_backward(inputs, call, saved, sums, wanted)
    memory = [x for x in (*made, sums) if x is not None]
    a = call.arguments
    # Rows of a side's layers and of the output layer, durations behind the others. Cut by one call
    # each: a call takes the host longer than a view.
    side, output, own = [a.V, a.padded_V - a.V, a.D], [a.V, a.padded_O - a.V], [0, 2]
    if a.K:
        side += [a.K, a.padded_K - a.K]
        output, own = [a.V, a.K, a.padded_O - a.V - a.K], [0, 2, 3]
    found: dict[str, Tensor | None] = {"encoder": made.encoder, "predictor": made.predictor}
    sizes = [*(rows * a.D for rows in output), *output, *side, *side]
    cut = sums.split_with_sizes(sizes)
    count = len(output)
    found["output_weight"], found["output_bias"] = cut[0].view(a.V, a.D), cut[count]
    if a.K:
        found["duration_weight"], found["duration_bias"] = cut[1].view(a.K, a.D), cut[count + 1]
    biases = cut[2 * count :]
    for weights_of_side, names, first in (
        (made.encoder_weights, ("am", "encoder", "duration_am"), 0),
        (made.predictor_weights, ("lm", "decoder", "duration_lm"), len(side)),
    ):
        rows = None if weights_of_side is None else weights_of_side.split_with_sizes(side)
        for name, at in zip(names, own, strict=False):
            found[f"{name}_bias"] = biases[first + at]
            if rows is not None:
                found[f"{name}_weight"] = rows[at]
    of_inputs = []
    for name, like in zip(StepInputs._fields, inputs, strict=True):
        gradient = found.get(name) if wanted[name] else None
        if gradient is not None and like is not None and gradient.dtype != like.dtype:
            gradient = gradient.to(like.dtype)
            memory.append(gradient)
        of_inputs.append(gradient)
    return _Gradients(of_inputs, memory)


def _run(
    inputs: StepInputs,
    targets_and_lengths: Sequence[Tensor],
    plan: StepPlan,
    wanted: Mapping[str, bool],
) -> tuple[StepCall, StepLosses, _Gradients | StepBuffers]:
    """The losses, and with grads_in_forward their gradients, else the buffers for backward."""
    call, losses, buffers, sums = forward(inputs, targets_and_lengths, plan)
    if sums is None:
        return call, losses, buffers
    saved = buffers.saved
    # The workspace is freed before more is allocated.
    del buffers
    # All that the host can do now it need not do in the thread that goes back.
    return call, losses, _gradients(inputs, call, saved, sums, wanted)


class _PrunedStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor | None, ...]:
        utterances: Utterances
        plan: StepPlan
        *tensors, utterances, plan = arguments
        *targets_and_lengths, host_lengths = utterances
        wanted = dict(zip(StepInputs._fields, ctx.needs_input_grad, strict=False))
        # Under no_grad inputs are wanted that will never get a gradient.
        grads_in_forward = (
            plan.differentiable and any(ctx.needs_input_grad) and plan.reduction != "none"
        )
        inputs = _contiguous(tensors)
        plan = plan._replace(packed=host_lengths is not None, grads_in_forward=grads_in_forward)
        call, losses, ctx.saved_buffers = _run(inputs, targets_and_lengths, plan, wanted)
        ctx.save_for_backward(*tensors, *targets_and_lengths, losses.start)
        ctx.call, ctx.wanted = call, wanted
        _, _, _, *not_differentiable = losses
        ctx.mark_non_differentiable(*(x for x in not_differentiable if x is not None))
        ctx.set_materialize_grads(False)
        return losses

    @staticmethod
    @refuses_second_derivative
    def backward(
        ctx: Any, total: Tensor | None, simple: Tensor | None, pruned: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        *tensors, targets, logit_lengths, target_lengths, start = ctx.saved_tensors
        inputs = _contiguous(tensors)
        targets_and_lengths = (targets, logit_lengths, target_lengths)
        call: StepCall = ctx.call
        # The first pass takes the buffers; a second one, with retain_graph, computes them anew.
        buffers, ctx.saved_buffers = ctx.saved_buffers, None
        plan = call.plan
        if plan.grads_in_forward and not (simple is None and pruned is None):
            plan, buffers = plan._replace(grads_in_forward=False), None
        if buffers is None:
            call, losses, buffers = _run(inputs, targets_and_lengths, plan, ctx.wanted)
            start = losses.start
            del losses
        if isinstance(buffers, _Gradients):
            scale(None, total, buffers.memory)
            return (*buffers.of_inputs, None, None)
        upstream, saved = (total, simple, pruned), buffers.saved
        sums = rows_backward(upstream, targets_and_lengths, start, call, buffers)
        del buffers
        return (*_gradients(inputs, call, saved, sums, ctx.wanted).of_inputs, None, None)


def pruned_step(inputs: StepInputs, utterances: Utterances, plan: StepPlan) -> StepLosses:
    """Losses that are differentiable in all inputs, which has_dtypes_of_step accepts.

    utterances: lengths on the CPU, or int32 on the step's device.
    """
    return StepLosses(*_PrunedStep.apply(*inputs, utterances, plan))  # type: ignore[no-untyped-call]
