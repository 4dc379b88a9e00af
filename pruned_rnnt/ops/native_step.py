"""The pruned step by a compiled library in three calls: a host is slower than a GPU.

Axes as in pruned_step.py, which says what is computed and is the reference; W = U+1.

Python allocates a few pieces of memory, whose sizes and inner layout the library knows
(csrc/cuda/step_layout.cuh), so that an out-of-memory keeps its type; the library casts the weights,
calls the kernels of the other ops and cuBLAS one after the other, and waits for nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops._library import LIBRARY, accumulator
from pruned_rnnt.ops._native import has_native_kernel
from pruned_rnnt.ops.linear_layers import padded_width
from pruned_rnnt.ops.second_derivative import refuses_second_derivative
from pruned_rnnt.ops.simple_products import exp_layout
from pruned_rnnt.ops.step_plan import INPUTS, OUTPUT, StepPlan

_TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
_REDUCED = {"none": 0, "sum": 1, "mean": 2}

# sizes: StepSizes; scales: StepScales; layers: weight and bias of five layers. saved, work,
# gradients, scratch: uint8 memory of the sizes that pruned_step_bytes tells, which are (6) int64 on
# the CPU: saved, work, work without the simple loss, gradients, scratch of rows_backward and of
# layers_backward.
# -> gx, gy (N,T,W) acc, start (N,T) int32, total and parts: the weighted sum of the two losses
# and the losses, (N) and (2,N), or reduced, () and (2).
LIBRARY.define("pruned_step_bytes(int[] sizes, Tensor(a!) bytes) -> ()")
LIBRARY.define(
    "pruned_step_forward(Tensor encoder, Tensor predictor, Tensor[] layers, Tensor targets, "
    "Tensor logit_lengths, Tensor target_lengths, Tensor? row_splits, int[] sizes, "
    "float[] scales, Tensor(a!) saved, Tensor(b!) work, Tensor(c!) gx, Tensor(d!) gy, "
    "Tensor(e!) start, Tensor(f!) total, Tensor(g!) parts) -> ()"
)
# The gradients of total and of the two losses, None for none -> weight (V',D) and bias (V') of the
# output layer, acc, and what layers_backward takes in `gradients`. work as the forward left it,
# with the last chunk, or memory for one chunk.
LIBRARY.define(
    "pruned_step_rows_backward(Tensor? grad_total, Tensor? grad_simple, Tensor? grad_pruned, "
    "Tensor targets, Tensor logit_lengths, Tensor target_lengths, Tensor? row_splits, "
    "Tensor start, int[] sizes, float[] scales, Tensor saved, bool work_is_kept, "
    "Tensor(a!) work, Tensor(b!) scratch, Tensor(c!) gradients, Tensor(d!) weight, "
    "Tensor(e!) bias) -> ()"
)
# -> gradients of the inputs in their dtype, of the weights (O',I) in theirs, of the biases (O') in
# acc; None for what is not wanted.
LIBRARY.define(
    "pruned_step_layers_backward(Tensor encoder, Tensor predictor, int[] sizes, Tensor saved, "
    "Tensor gradients, Tensor(a!) scratch, Tensor(b!)? grad_encoder, Tensor(c!)? grad_predictor, "
    "Tensor(d!)? am_weight, Tensor(e!)? am_bias, Tensor(f!)? lm_weight, Tensor(g!)? lm_bias, "
    "Tensor(h!)? encoder_weight, Tensor(i!)? encoder_bias, Tensor(j!)? decoder_weight, "
    "Tensor(k!)? decoder_bias) -> ()"
)
_ops = torch.ops.pruned_rnnt


class StepSizes(NamedTuple):
    """The integers of a step, in the order of step_layout.cuh."""

    N: int
    T: int
    W: int
    E: int
    P: int
    D: int
    V: int
    S: int
    rows: int
    chunk_rows: int
    hidden_rows: int
    blank: int
    rnnt_type: int
    mode: int
    activation: int
    exact_bounds: bool
    differentiable: bool
    reduced: int
    split: bool
    cast_encoder: bool
    cast_predictor: bool
    dtype: int


class StepScales(NamedTuple):
    """The floating-point options, in the order of step_layout.cuh."""

    lm_only: float
    delay_penalty: float
    fastemit_lambda: float
    clamp: float
    simple: float
    pruned: float


def takes_native_step(inputs: tuple[Tensor, ...], plan: StepPlan) -> bool:
    """Whether the library has the step for these inputs and layers.

    A prior of the predictor (am_only_scale) it does not have; and gradients are written in the
    dtype of the products or in float32.
    """
    return (
        inputs[0].is_cuda
        and has_native_kernel("pruned_step_forward", "cuda")
        and plan.simple.am_only_scale == 0
        and all(x.dtype in (plan.dtype, accumulator(plan.dtype)) for x in inputs)
    )


def _sizes(arguments: tuple[Any, ...], plan: StepPlan) -> StepSizes:
    encoder, predictor = arguments[:2]
    batch, frames, encoder_dim = encoder.shape
    rows = plan.rows
    return StepSizes(
        N=batch,
        T=frames,
        W=predictor.shape[1],
        E=encoder_dim,
        P=predictor.shape[2],
        D=arguments[2 + 2 * OUTPUT].shape[1],
        V=rows.vocabulary,
        S=rows.columns,
        rows=rows.cuts[-1],
        chunk_rows=rows.cuts[1],
        hidden_rows=rows.hidden_rows,
        blank=plan.simple.blank,
        rnnt_type=plan.simple.rnnt_type,
        mode=rows.options.mode,
        activation=rows.activation,
        exact_bounds=plan.exact_bounds,
        differentiable=plan.differentiable,
        reduced=_REDUCED[plan.reduction],
        split=exp_layout(plan.dtype, encoder.device).split,
        cast_encoder=encoder.dtype != plan.dtype,
        cast_predictor=predictor.dtype != plan.dtype,
        dtype=_TYPES[plan.dtype],
    )


class NativeStep(torch.autograd.Function):
    """pruned_step._PrunedStep by the library: the same arguments, results and gradients."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        plan: StepPlan = arguments[-1]
        targets, logit_lengths, target_lengths, row_splits = arguments[INPUTS:-1]
        sizes = _sizes(arguments, plan)
        size_list = [int(x) for x in sizes]
        encoder, predictor = (x.contiguous() for x in arguments[:2])
        layers = [x.contiguous() for x in arguments[2:INPUTS]]
        options = plan.rows.options
        scales = StepScales(
            plan.simple.lm_only_scale,
            options.delay_penalty,
            options.fastemit_lambda,
            options.clamp,
            plan.simple_scale,
            plan.pruned_scale,
        )
        scale_list = [float(x) for x in scales]
        count = torch.empty(6, dtype=torch.int64)
        _ops.pruned_step_bytes(size_list, count)
        ctx.bytes = count.tolist()
        acc, batch = accumulator(plan.dtype), sizes.N
        saved, work = (encoder.new_empty(n, dtype=torch.uint8) for n in ctx.bytes[:2])
        gx, gy = encoder.new_empty((2, batch, sizes.T, sizes.W), dtype=acc).unbind(0)
        start = encoder.new_empty((batch, sizes.T), dtype=torch.int32)
        shape = () if sizes.reduced else (batch,)
        total = encoder.new_empty(shape, dtype=acc)
        parts = encoder.new_empty((2, *shape), dtype=acc)
        _ops.pruned_step_forward(
            encoder,
            predictor,
            layers,
            targets,
            logit_lengths,
            target_lengths,
            row_splits,
            size_list,
            scale_list,
            saved,
            work,
            gx,
            gy,
            start,
            total,
            parts,
        )
        ctx.save_for_backward(
            None if sizes.cast_encoder else encoder,
            None if sizes.cast_predictor else predictor,
            targets,
            logit_lengths,
            target_lengths,
            row_splits,
            start,
            saved,
        )
        ctx.kept = work
        ctx.shapes = [(x.shape, x.dtype) for x in arguments[:INPUTS]]
        ctx.vocabulary, ctx.dtype, ctx.numbers = sizes.V, plan.dtype, (size_list, scale_list)
        ctx.mark_non_differentiable(gx, gy, start)
        ctx.set_materialize_grads(False)
        simple, pruned = parts.unbind(0)
        return total, simple, pruned, gx, gy, start

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        encoder, predictor, *batch, saved = ctx.saved_tensors
        acc = accumulator(ctx.dtype)
        upstream = [None if x is None else x.to(acc).contiguous() for x in grads[:3]]
        # The workspace is spent by the first pass; with retain_graph a second one starts afresh.
        kept, ctx.kept = ctx.kept, None
        _, _, row_bytes, gradient_bytes, *scratch_bytes = ctx.bytes
        work = saved.new_empty(row_bytes) if kept is None else kept
        scratch, gradients = (saved.new_empty(n) for n in (scratch_bytes[0], gradient_bytes))
        results = _empty_gradients(ctx, saved)
        # All but the scratch of the layers is dropped before that is made.
        output = results[2 * OUTPUT :]
        _ops.pruned_step_rows_backward(
            *upstream,
            *batch,
            *ctx.numbers,
            saved,
            kept is not None,
            work,
            scratch,
            gradients,
            *output,
        )
        del kept, work, scratch
        inputs = [
            saved.new_empty(shape, dtype=dtype) if wanted else None
            for (shape, dtype), wanted in zip(ctx.shapes[:2], ctx.needs_input_grad[:2], strict=True)
        ]
        _ops.pruned_step_layers_backward(
            saved if encoder is None else encoder,
            saved if predictor is None else predictor,
            ctx.numbers[0],
            saved,
            gradients,
            saved.new_empty(scratch_bytes[1]),
            *inputs,
            *results[: 2 * OUTPUT],
        )
        wanted = ctx.needs_input_grad[2:INPUTS]
        layers = [
            _without_padding(grad, *like) if grad is not None and is_wanted else None
            for grad, like, is_wanted in zip(results, ctx.shapes[2:], wanted, strict=True)
        ]
        return (*inputs, *layers, *[None] * 5)


def _without_padding(gradient: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    # Most have none: even a slice of everything takes time, ten times a step.
    if gradient.shape[0] != shape[0]:
        gradient = gradient[: shape[0]]
    return gradient if gradient.dtype == dtype else gradient.to(dtype)


def _empty_gradients(ctx: Any, like: Tensor) -> list[Tensor | None]:
    """Memory for the gradients of the layers, padded; the output layer's are always made."""
    results: list[Tensor | None] = []
    acc = accumulator(ctx.dtype)
    for number, (shape, dtype) in enumerate(ctx.shapes[2:]):
        is_output = number >= 2 * OUTPUT
        if not is_output and not ctx.needs_input_grad[2 + number]:
            results.append(None)
            continue
        rows = padded_width(shape[0], ctx.dtype) if shape[0] == ctx.vocabulary else shape[0]
        kind = acc if is_output or number % 2 == 1 else dtype
        results.append(like.new_empty((rows, *shape[1:]), dtype=kind))
    return results
