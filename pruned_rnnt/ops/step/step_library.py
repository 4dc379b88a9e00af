"""The compiled library's pruned step: its calls, and the memory that they are given.

Axes as in pruned_step.py, which says what is computed and is the reference; W = U+1, V' = V rounded
up.

Python allocates a few pieces of memory, whose sizes and inner layout the library knows
(csrc/cuda/step/step_layout.cuh), so that an out-of-memory keeps its type; the library casts the
weights, calls the kernels of the other ops and cuBLAS one after the other, and waits for nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import LIBRARY, accumulator
from pruned_rnnt.ops.simple.simple_products import exp_layout
from pruned_rnnt.ops.step.step_plan import AM, DECODER, ENCODER, LM, OUTPUT, StepPlan

_TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
_REDUCED = {"none": 0, "sum": 1, "mean": 2}
_UNKNOWN = (0,) * 4

# sizes: StepSizes and room for Memory, int64; scales: StepScales, float64; both on the CPU, as
# tensors: lists of numbers take longer to pass. layers: weight and bias of five layers; lengths: on
# the CPU (int32, int64) if rows are packed, else int32 beside the rest. saved, work: uint8 memory,
# of the sizes that pruned_step_bytes fills in, which may set chunk_rows to more.
# -> gx, gy (N,T,W) acc, start (N,T) int32, total and parts: the weighted sum of the two losses
# and the losses, (N) and (2,N), or reduced, () and (2), then with the three of each utterance in
# each (3,N). With at_once also what rows_backward does.
LIBRARY.define("pruned_step_bytes(Tensor(a!) sizes) -> ()")
LIBRARY.define(
    "pruned_step_forward(Tensor encoder, Tensor predictor, Tensor[] layers, Tensor targets, "
    "Tensor logit_lengths, Tensor target_lengths, Tensor sizes, Tensor scales, Tensor(a!) saved, "
    "Tensor(b!) work, Tensor(c!) gx, Tensor(d!) gy, Tensor(e!) start, Tensor(f!) total, "
    "Tensor(g!) parts, Tensor(h!)? each, Tensor(i!)? sums) -> ()"
)
# The gradients of total and of the two losses, None for none -> in saved what layers_backward
# takes; sums, acc: the gradients of the output layer's weight (V',D) and bias (V'). work as the
# forward has left it.
LIBRARY.define(
    "pruned_step_rows_backward(Tensor? grad_total, Tensor? grad_simple, Tensor? grad_pruned, "
    "Tensor targets, Tensor logit_lengths, Tensor target_lengths, Tensor start, Tensor sizes, "
    "Tensor scales, Tensor(a!) saved, Tensor(b!) work, Tensor(c!) sums) -> ()"
)
# -> gradients of the inputs in their dtype, of the weights (V'+D,E) and (V'+D,P) of the two layers
# that read each in theirs, None for what is not wanted; and in sums, behind the output layer's, of
# the biases (V'+D), acc, of each.
LIBRARY.define(
    "pruned_step_layers_backward(Tensor encoder, Tensor predictor, Tensor sizes, "
    "Tensor(a!) saved, Tensor(b!)? grad_encoder, Tensor(c!)? grad_predictor, "
    "Tensor(d!)? encoder_weights, Tensor(e!)? predictor_weights, Tensor(f!) sums) -> ()"
)
_ops = torch.ops.pruned_rnnt


class StepSizes(NamedTuple):
    """The integers of a step, in the order of csrc/cuda/step/step_sizes.cuh."""

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
    at_once: bool


class StepScales(NamedTuple):
    """The floating-point options, in the order of csrc/cuda/step/step_sizes.cuh."""

    lm_only: float
    delay_penalty: float
    fastemit_lambda: float
    clamp: float
    simple: float
    pruned: float


def _sizes(inputs: Sequence[Tensor], packed: bool, at_once: bool, plan: StepPlan) -> StepSizes:
    encoder, predictor = inputs[:2]
    batch, frames, encoder_dim = encoder.shape
    rows = plan.rows
    return StepSizes(
        N=batch,
        T=frames,
        W=predictor.shape[1],
        E=encoder_dim,
        P=predictor.shape[2],
        D=inputs[2 + 2 * OUTPUT].shape[1],
        V=rows.vocabulary,
        S=rows.columns,
        rows=rows.cuts[-1],
        chunk_rows=rows.cuts[1],
        hidden_rows=rows.hidden_rows,
        blank=plan.simple.blank,
        rnnt_type=plan.simple.rnnt_type,
        mode=rows.options.normalization,
        activation=rows.activation,
        exact_bounds=plan.exact_bounds,
        differentiable=plan.differentiable,
        reduced=_REDUCED[plan.reduction],
        split=exp_layout(plan.dtype, encoder.device).split,
        cast_encoder=encoder.dtype != plan.dtype,
        cast_predictor=predictor.dtype != plan.dtype,
        dtype=_TYPES[plan.dtype],
        packed=packed,
        at_once=at_once,
    )


class Memory(NamedTuple):
    """What pruned_step_bytes fills in: bytes, elements of sums, and V'."""

    saved: int
    work: int
    sums: int
    padded_vocabulary: int


@lru_cache(maxsize=16)
def _scale_tensor(scales: StepScales) -> Tensor:
    """The same few, once the warm-up is over."""
    return torch.tensor(scales, dtype=torch.float64, device="cpu")


class Told(NamedTuple):
    """What the library is told about a step beside tensors on its device; acc: dtype of sums."""

    sizes: StepSizes
    memory: Memory
    numbers: Tensor
    scales: Tensor
    acc: torch.dtype


def told_of(inputs: Sequence[Tensor], packed: bool, at_once: bool, plan: StepPlan) -> Told:
    sizes = _sizes(inputs, packed, at_once, plan)
    options = plan.rows.options
    scales = StepScales(
        plan.simple.lm_only_scale,
        options.delay_penalty,
        options.fastemit_lambda,
        options.clamp,
        plan.simple_scale,
        plan.pruned_scale,
    )
    # One memory for Python and the library.
    values = array("q", (*sizes, *_UNKNOWN))
    numbers = torch.frombuffer(values, dtype=torch.int64)
    _ops.pruned_step_bytes.default(numbers)
    return Told(
        sizes,
        Memory(*values[len(sizes) :]),
        numbers,
        _scale_tensor(scales),
        accumulator(plan.dtype),
    )


class Losses(NamedTuple):
    """total () or (N,), parts (2,) or (2,N), each (3,N) where these are reduced, gx, gy (N,T,W),
    start (N,T); then what a backward pass spends: memory, and sums where it has begun."""

    total: Tensor
    parts: Tensor
    each: Tensor | None
    gx: Tensor
    gy: Tensor
    start: Tensor
    saved: Tensor
    work: Tensor
    sums: Tensor | None


def losses_of(inputs: list[Tensor], where: Sequence[Tensor], told: Told) -> Losses:
    sizes, memory, _, _, acc = told
    saved = inputs[0].new_empty(memory.saved, dtype=torch.uint8)
    work = saved.new_empty(memory.work)
    gx, gy = saved.new_empty((2, sizes.N, sizes.T, sizes.W), dtype=acc).unbind()
    start = saved.new_empty((sizes.N, sizes.T), dtype=torch.int32)
    shape = () if sizes.reduced else (sizes.N,)
    total = saved.new_empty(shape, dtype=acc)
    parts = saved.new_empty((2, *shape), dtype=acc)
    each = saved.new_empty((3, sizes.N), dtype=acc) if sizes.reduced else None
    sums = saved.new_empty(memory.sums, dtype=acc) if sizes.at_once else None
    _ops.pruned_step_forward.default(
        inputs[0],
        inputs[1],
        inputs[2:],
        *where,
        told.numbers,
        told.scales,
        saved,
        work,
        gx,
        gy,
        start,
        total,
        parts,
        each,
        sums,
    )
    return Losses(total, parts, each, gx, gy, start, saved, work, sums)


def rows_backward(
    upstream: Sequence[Tensor | None],
    where: Sequence[Tensor],
    start: Tensor,
    told: Told,
    saved: Tensor,
    work: Tensor,
    sums: Tensor,
) -> None:
    """What losses_of has not done yet where gradients are not made at once."""
    _ops.pruned_step_rows_backward.default(
        *upstream, *where, start, told.numbers, told.scales, saved, work, sums
    )


# Arguments of the two layers that read the encoder, and of those that read the predictor.
_OF_SIDES = [
    [2 + 2 * layer + i for layer in layers for i in range(2)]
    for layers in ((AM, ENCODER), (LM, DECODER))
]


def layer_gradients(
    inputs: list[Tensor], told: Told, saved: Tensor, sums: Tensor, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Of the inputs (2), of the weights of the layers that read them (2), sums: as
    pruned_step_layers_backward says."""
    outputs = told.memory.padded_vocabulary + told.sizes.D
    sides = inputs[:2]
    results = [torch.empty_like(x) if wanted[i] else None for i, x in enumerate(sides)]
    for own, x in zip(_OF_SIDES, sides, strict=True):
        is_wanted = any(wanted[i] for i in own)
        results.append(inputs[2].new_empty((outputs, x.shape[2])) if is_wanted else None)
    _ops.pruned_step_layers_backward.default(*sides, told.numbers, saved, *results, sums)
    return [*results, sums]
