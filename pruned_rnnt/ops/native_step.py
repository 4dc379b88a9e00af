"""The pruned step by a compiled library in three calls: a host is slower than a GPU.

Axes as in pruned_step.py, which says what is computed and is the reference; W = U+1.

Python allocates a few pieces of memory, whose sizes and inner layout the library knows
(csrc/cuda/step_layout.cuh), so that an out-of-memory keeps its type; the library casts the weights,
calls the kernels of the other ops and cuBLAS one after the other, and waits for nothing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from pruned_rnnt.ops._library import LIBRARY, accumulator
from pruned_rnnt.ops._native import has_native_kernel
from pruned_rnnt.ops.second_derivative import refuses_second_derivative
from pruned_rnnt.ops.simple_products import exp_layout
from pruned_rnnt.ops.step_plan import AM, DECODER, ENCODER, INPUTS, LM, OUTPUT, StepPlan
from pruned_rnnt.ops.utterances import Utterances

_TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
_REDUCED = {"none": 0, "sum": 1, "mean": 2}
_UNKNOWN = (0,) * 7

# sizes: StepSizes and room for Memory, int64; scales: StepScales, float64; both on the CPU, as
# tensors: lists of numbers take longer to pass. layers: weight and bias of five layers; lengths: on
# the CPU (int32, int64) if rows are packed, else int32 beside the rest. saved, work, gradients,
# scratch: uint8 memory, of the sizes that pruned_step_bytes fills in, which may set chunk_rows to
# more.
# -> gx, gy (N,T,W) acc, start (N,T) int32, total and parts: the weighted sum of the two losses
# and the losses, (N) and (2,N), or reduced, () and (2).
LIBRARY.define("pruned_step_bytes(Tensor(a!) sizes) -> ()")
LIBRARY.define(
    "pruned_step_forward(Tensor encoder, Tensor predictor, Tensor[] layers, Tensor targets, "
    "Tensor logit_lengths, Tensor target_lengths, Tensor sizes, Tensor scales, Tensor(a!) saved, "
    "Tensor(b!) work, Tensor(c!) gx, Tensor(d!) gy, Tensor(e!) start, Tensor(f!) total, "
    "Tensor(g!) parts) -> ()"
)
# The gradients of total and of the two losses, None for none -> weight (V,D) and bias (V) of the
# output layer, acc, and what layers_backward takes in `gradients`. work as the forward left it,
# with the last chunk, or memory for one chunk.
LIBRARY.define(
    "pruned_step_rows_backward(Tensor? grad_total, Tensor? grad_simple, Tensor? grad_pruned, "
    "Tensor targets, Tensor logit_lengths, Tensor target_lengths, Tensor start, Tensor sizes, "
    "Tensor scales, Tensor saved, bool work_is_kept, Tensor(a!) work, Tensor(b!) gradients, "
    "Tensor(c!) biases) -> ()"
)
# -> gradients of the inputs in their dtype, None for what is not wanted, and behind each other of
# the weights (O,I) of the first four layers in theirs, and of their biases (O) in acc, but for
# those whose bit in `wanted` is 0: 1, 2, 4, 8 are the layers.
LIBRARY.define(
    "pruned_step_layers_backward(Tensor encoder, Tensor predictor, Tensor sizes, Tensor saved, "
    "Tensor gradients, int wanted, Tensor(a!) scratch, Tensor(b!)? grad_encoder, "
    "Tensor(c!)? grad_predictor, Tensor(d!) weights, Tensor(e!) biases) -> ()"
)
_ops = torch.ops.pruned_rnnt


class StepSizes(NamedTuple):
    """The integers of a step, in the order of csrc/cuda/step_sizes.cuh."""

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
    packed: bool


class StepScales(NamedTuple):
    """The floating-point options, in the order of csrc/cuda/step_sizes.cuh."""

    lm_only: float
    delay_penalty: float
    fastemit_lambda: float
    clamp: float
    simple: float
    pruned: float


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
        and all(inputs[2 + i].dtype == inputs[2].dtype for i in _WEIGHTS)
    )


def _sizes(arguments: tuple[Any, ...], packed: bool, plan: StepPlan) -> StepSizes:
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
        packed=packed,
    )


class Memory(NamedTuple):
    """What pruned_step_bytes fills in: bytes, and elements of the gradients of parameters."""

    saved: int
    work: int
    row_work: int
    gradients: int
    scratch: int
    weights: int
    biases: int


@lru_cache(maxsize=16)
def _scale_tensor(scales: StepScales) -> Tensor:
    """The same few, once the warm-up is over."""
    return torch.tensor(scales, dtype=torch.float64, device="cpu")


class NativeStep(torch.autograd.Function):
    """pruned_step._PrunedStep by the library: the same arguments, results and gradients."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        utterances: Utterances
        plan: StepPlan
        utterances, plan = arguments[INPUTS:]
        encoder, predictor, *layers = (x.contiguous() for x in arguments[:INPUTS])
        sizes = _sizes(arguments, utterances.host_lengths is not None, plan)
        options = plan.rows.options
        scales = StepScales(
            plan.simple.lm_only_scale,
            options.delay_penalty,
            options.fastemit_lambda,
            options.clamp,
            plan.simple_scale,
            plan.pruned_scale,
        )
        numbers = torch.tensor([*sizes, *_UNKNOWN], dtype=torch.int64, device="cpu")
        _ops.pruned_step_bytes.default(numbers)
        memory = Memory(*numbers.tolist()[len(sizes) :])
        acc = accumulator(plan.dtype)
        saved = encoder.new_empty(memory.saved, dtype=torch.uint8)
        work = saved.new_empty(memory.work)
        gx, gy = saved.new_empty((2, sizes.N, sizes.T, sizes.W), dtype=acc).unbind()
        start = saved.new_empty((sizes.N, sizes.T), dtype=torch.int32)
        shape = () if sizes.reduced else (sizes.N,)
        total = saved.new_empty(shape, dtype=acc)
        parts = saved.new_empty((2, *shape), dtype=acc)
        where = utterances[:3]
        _ops.pruned_step_forward.default(
            encoder,
            predictor,
            layers,
            *where,
            numbers,
            _scale_tensor(scales),
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
            *where,
            start,
            saved,
        )
        ctx.kept, ctx.memory, ctx.numbers, ctx.scales = work, memory, numbers, scales
        ctx.acc, ctx.parameters = acc, arguments[2:INPUTS]
        ctx.inputs = [(x.shape, x.dtype) for x in arguments[:2]]
        ctx.mark_non_differentiable(gx, gy, start)
        ctx.set_materialize_grads(False)
        return total, *parts.unbind(), gx, gy, start

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        encoder, predictor, *where, saved = ctx.saved_tensors
        memory: Memory = ctx.memory
        acc, wanted = ctx.acc, ctx.needs_input_grad
        upstream = [None if x is None else x.to(acc).contiguous() for x in grads[:3]]
        # The workspace is spent by the first pass; with retain_graph a second one starts afresh.
        kept, ctx.kept = ctx.kept, None
        work = saved.new_empty(memory.row_work) if kept is None else kept
        gradients = saved.new_empty(memory.gradients)
        biases = saved.new_empty(memory.biases, dtype=acc)
        _ops.pruned_step_rows_backward.default(
            *upstream,
            *where,
            ctx.numbers,
            _scale_tensor(ctx.scales),
            saved,
            kept is not None,
            work,
            gradients,
            biases,
        )
        # Given back before more is asked for.
        del kept, work
        inputs = [
            saved.new_empty(shape, dtype=dtype) if is_wanted else None
            for (shape, dtype), is_wanted in zip(ctx.inputs, wanted[:2], strict=True)
        ]
        like = ctx.parameters
        weights = saved.new_empty(memory.weights, dtype=like[0].dtype)
        _ops.pruned_step_layers_backward.default(
            saved if encoder is None else encoder,
            saved if predictor is None else predictor,
            ctx.numbers,
            saved,
            gradients,
            sum(1 << i for i in range(OUTPUT) if wanted[2 + 2 * i] or wanted[3 + 2 * i]),
            saved.new_empty(memory.scratch),
            *inputs,
            weights,
            biases,
        )
        parameters: list[Tensor | None] = [None] * len(like)
        # One memory for all of a kind, and views by one call: ten allocations take the host longer.
        for flat, order in ((weights, _WEIGHTS), (biases, _BIASES)):
            views = _unflatten_dense_tensors(flat, [like[i] for i in order])
            for i, view in zip(order, views, strict=True):
                if wanted[2 + i]:
                    parameters[i] = view if view.dtype == like[i].dtype else view.to(like[i].dtype)
        return (*inputs, *parameters, None, None)


# Of the layers' tensors, in the order in which the library puts their gradients.
_WEIGHTS = (2 * AM, 2 * ENCODER, 2 * LM, 2 * DECODER)
_BIASES = (2 * OUTPUT, 2 * OUTPUT + 1, *range(1, 2 * OUTPUT, 2))
