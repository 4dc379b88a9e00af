"""The calls of the compiled library's pruned step, and the memory that Python allocates for them.

W = U+1, V' = V rounded up to 16 bytes of elements: 16-bit products whose width is no multiple of 8
take more than twice the time.

Python allocates a few pieces of memory, so that running out of memory raises torch's own error. The
library answers how large they are, divides them (csrc/cuda/step/step_layout.cuh), casts the weights
and calls the kernels of the other ops and cuBLAS one after the other, without waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import accumulator
from pruned_rnnt.ops.simple.simple_products import exp_layout
from pruned_rnnt.ops.step.step_ops import FIELDS, STEP_OPS, StepArguments, StepCall
from pruned_rnnt.ops.step.step_plan import StepInputs, StepLosses, StepPlan


def padded_to_16_bytes(width: int, dtype: torch.dtype) -> int:
    multiple = 16 // dtype.itemsize
    return -(-width // multiple) * multiple


def _step_call(inputs: StepInputs, plan: StepPlan) -> StepCall:
    assert FIELDS is not None
    batch, frames, encoder_dim = inputs.encoder.shape
    joiner, options = plan.joiner, plan.joiner.options
    exponentials = exp_layout(plan.dtype, inputs.encoder.device)
    padded_V = padded_to_16_bytes(joiner.vocabulary, plan.dtype)
    durations, tdt = plan.durations, plan.simple.recursion.tdt
    arguments = StepArguments(
        N=batch,
        T=frames,
        W=inputs.predictor.shape[1],
        E=encoder_dim,
        P=inputs.predictor.shape[2],
        D=inputs.output_weight.shape[1],
        V=joiner.vocabulary,
        S=joiner.columns,
        padded_V=padded_V,
        K=len(durations),
        padded_K=padded_to_16_bytes(len(durations), plan.dtype),
        padded_O=padded_to_16_bytes(joiner.vocabulary + len(durations), plan.dtype),
        longest=max(durations, default=0),
        rows=joiner.rows,
        least_chunk_rows=joiner.largest,
        hidden_rows=joiner.hidden_rows,
        blank=options.blank,
        rnnt_type=options.rnnt_type,
        mode=options.normalization,
        activation=joiner.activation,
        exact_bounds=plan.exact_bounds,
        differentiable=plan.differentiable,
        grads_in_forward=plan.grads_in_forward,
        packed=plan.packed,
        cast_encoder=inputs.encoder.dtype != plan.dtype,
        cast_predictor=inputs.predictor.dtype != plan.dtype,
        reduction=FIELDS.choice("reduction", plan.reduction),
        dtype=FIELDS.choice("dtype", plan.dtype),
        exp_dtype=FIELDS.choice("exp_dtype", exponentials.dtype),
        am_parts=exponentials.am_parts,
        lm_parts=exponentials.lm_parts,
        exp_multiple=exponentials.multiple,
        exp_together=exponentials.together(batch, frames, padded_V),
        lm_only_scale=plan.simple.scales.lm_only_scale,
        delay_penalty=options.delay_penalty,
        fastemit_lambda=options.fastemit_lambda,
        clamp=options.clamp,
        sigma=0.0 if tdt is None else tdt.sigma,
        simple_scale=plan.simple_scale,
        pruned_scale=plan.pruned_scale,
    )
    return FIELDS.call(arguments, plan)


class StepBuffers(NamedTuple):
    """uint8 memory that forward leaves for backward: saved, and work, which holds the last chunk
    until pruned_step_rows_backward has read it."""

    saved: Tensor
    work: Tensor


def forward(
    inputs: StepInputs, targets_and_lengths: Sequence[Tensor], plan: StepPlan
) -> tuple[StepCall, StepLosses, StepBuffers, Tensor | None]:
    """The call, its losses and buffers, and with grads_in_forward the sums of rows_backward."""
    call = _step_call(inputs, plan)
    encoder, predictor, *layers = inputs.given
    arguments, memory, fields, _ = call
    N, T, W, acc = arguments.N, arguments.T, arguments.W, accumulator(plan.dtype)
    is_reduced = plan.reduction != "none"
    saved = encoder.new_empty(memory.saved_bytes, dtype=torch.uint8)
    work = saved.new_empty(memory.work_bytes)
    gx, gy = saved.new_empty((2, N, T, W), dtype=acc).unbind()
    start = saved.new_empty((N, T), dtype=torch.int32)
    shape = () if is_reduced else (N,)
    total = saved.new_empty(shape, dtype=acc)
    parts = saved.new_empty((2, *shape), dtype=acc)
    utterance_losses = saved.new_empty((3, N), dtype=acc) if is_reduced else None
    sums = saved.new_empty(memory.sums_size, dtype=acc) if arguments.grads_in_forward else None
    stay = gd = None
    if plan.durations:
        stay, gd = torch.empty_like(gx), gx.new_empty((N, T, W, arguments.K))
    written = (saved, work, gx, gy, start, total, parts, utterance_losses, sums, stay, gd)
    given = (encoder, predictor, layers, *targets_and_lengths, fields, plan.durations)
    STEP_OPS.pruned_step_forward.default(*given, *written)
    simple, pruned = parts.unbind()
    losses = StepLosses(total, simple, pruned, gx, gy, start, utterance_losses, stay, gd)
    return call, losses, StepBuffers(saved, work), sums


def rows_backward(
    upstream: Sequence[Tensor | None],
    targets_and_lengths: Sequence[Tensor],
    start: Tensor,
    call: StepCall,
    buffers: StepBuffers,
) -> Tensor:
    """The sums, for the gradients of the three losses; what forward does with grads_in_forward."""
    sums = buffers.saved.new_empty(call.memory.sums_size, dtype=accumulator(call.plan.dtype))
    contiguous = [None if x is None else x.contiguous() for x in upstream]
    given = (*contiguous, *targets_and_lengths, start, call.fields)
    STEP_OPS.pruned_step_rows_backward.default(*given, *buffers, sums)
    return sums


class LayerGradients(NamedTuple):
    """Gradients of the two inputs, and (V'+D+K',E) and (V'+D+K',P) of the weights of the layers
    that read each; None for what is not wanted."""

    encoder: Tensor | None
    predictor: Tensor | None
    encoder_weights: Tensor | None
    predictor_weights: Tensor | None


def layers_backward(
    inputs: StepInputs, call: StepCall, saved: Tensor, sums: Tensor, wanted: Mapping[str, bool]
) -> LayerGradients:
    """wanted: by the name of the input. Adds the gradients of the biases to sums."""
    outputs = call.arguments.padded_V + call.arguments.D + call.arguments.padded_K

    def input_gradient(name: str, x: Tensor) -> Tensor | None:
        return torch.empty_like(x) if wanted[name] else None

    def weights_gradient(x: Tensor, *layers: str) -> Tensor | None:
        if not any(wanted[f"{layer}_{kind}"] for layer in layers for kind in ("weight", "bias")):
            return None
        return inputs.am_weight.new_empty((outputs, x.shape[2]))

    gradients = LayerGradients(
        input_gradient("encoder", inputs.encoder),
        input_gradient("predictor", inputs.predictor),
        weights_gradient(inputs.encoder, "am", "encoder", "duration_am"),
        weights_gradient(inputs.predictor, "lm", "decoder", "duration_lm"),
    )
    given = (inputs.encoder, inputs.predictor, call.fields, saved)
    STEP_OPS.pruned_step_layers_backward.default(*given, *gradients, sums)
    return gradients
