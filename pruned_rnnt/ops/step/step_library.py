"""The pruned step of the compiled library: its inputs, options and results, the ops with the
numbers that they take by name, and the memory that Python allocates for them.

W = U+1, V' = V rounded up to 16 bytes of elements: 16-bit products whose width is no multiple of 8
take more than twice the time.

Python allocates a few pieces of memory, so that running out of memory raises torch's own error. The
library answers how large they are, divides them (csrc/cuda/step/step_layout.cuh), casts the weights
and calls the kernels of the other ops and cuBLAS one after the other, without waiting.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import LIBRARY, accumulator, declare, new_outputs
from pruned_rnnt.ops.common.native import has_native_kernel
from pruned_rnnt.ops.joiner.fused_log_probs import JoinerPlan
from pruned_rnnt.ops.simple.simple_loss import SimpleOptions
from pruned_rnnt.ops.simple.simple_products import exp_layout


class StepInputs(NamedTuple):
    """The differentiable arguments: encoder (N,T,E), predictor (N,U+1,P), and weight and bias of
    the five layers: am (V,E), lm (V,P), encoder (D,E), decoder (D,P) and output (V,D). Of TDT also
    those of durations: am (K,E), lm (K,P) and, of the joiner, (K,D)."""

    encoder: Tensor
    predictor: Tensor
    am_weight: Tensor
    am_bias: Tensor
    lm_weight: Tensor
    lm_bias: Tensor
    encoder_weight: Tensor
    encoder_bias: Tensor
    decoder_weight: Tensor
    decoder_bias: Tensor
    output_weight: Tensor
    output_bias: Tensor
    duration_am_weight: Tensor | None = None
    duration_am_bias: Tensor | None = None
    duration_lm_weight: Tensor | None = None
    duration_lm_bias: Tensor | None = None
    duration_weight: Tensor | None = None
    duration_bias: Tensor | None = None

    @property
    def given(self) -> list[Tensor]:
        """Without those that are None."""
        return [x for x in self if x is not None]


class StepPlan(NamedTuple):
    """dtype: of all products. differentiable: whether a backward pass may follow. reduction:
    `mean`, `sum` or `none`, of all three losses. The topology of the joiner's options is that of
    the band's rule, also with durations (prune_bounds.py). pruned_step chooses the last two:
    packed: lengths are on the CPU and rows packed; grads_in_forward: gradients for a gradient of
    1, at once."""

    dtype: torch.dtype
    differentiable: bool
    simple: SimpleOptions
    joiner: JoinerPlan
    exact_bounds: bool
    simple_scale: float
    pruned_scale: float
    reduction: str
    packed: bool = False
    grads_in_forward: bool = False

    @property
    def durations(self) -> list[int]:
        """Of TDT, otherwise none."""
        tdt = self.simple.recursion.tdt
        return [] if tdt is None else tdt.durations


class StepLosses(NamedTuple):
    """total = simple_scale simple + pruned_scale pruned, all three (N,) or (); emit and blank
    occupancy (N,T,U+1) and the start of the band (N,T); and if the losses are reduced, the three
    losses of each utterance (3,N), in the same order, without gradients. Of a TDT loss also the
    occupancies of symbols of duration 0 (N,T,U+1), and of each duration (N,T,U+1,K)."""

    total: Tensor
    simple: Tensor
    pruned: Tensor
    emit_occupancy: Tensor
    blank_occupancy: Tensor
    start: Tensor
    utterance_losses: Tensor | None
    stay_occupancy: Tensor | None = None
    duration_occupancy: Tensor | None = None


# fields: StepArguments and StepMemory as int64 on the CPU; a tensor, because a list of numbers
# takes longer to pass. pruned_step_fields returns their names and types in the order of
# csrc/cuda/step/step_fields.cuh; pruned_step_layout fills in those of StepMemory.
LIBRARY.define("pruned_step_fields() -> str")
declare("pruned_step_layout(Tensor(a!) fields) -> ()")
# layers: weight and bias of five layers, or of eight with TDT; lengths: on the CPU (int32, int64)
# if rows are packed, else int32 on the device. saved, work: uint8 memory. -> gx, gy (N,T,W) acc,
# start (N,T) int32; total and parts: the weighted sum of the two losses and the losses, (N) and
# (2,N), or reduced, () and (2), then with the three of each utterance in utterance_losses (3,N).
# With grads_in_forward also what pruned_step_rows_backward computes; with durations also stay
# (N,T,W) and gd (N,T,W,K).
declare(
    "pruned_step_forward(Tensor encoder, Tensor predictor, Tensor[] layers, Tensor targets, "
    "Tensor logit_lengths, Tensor target_lengths, Tensor fields, int[] durations, "
    "Tensor(a!) saved, Tensor(b!) work, Tensor(c!) gx, Tensor(d!) gy, Tensor(e!) start, "
    "Tensor(f!) total, Tensor(g!) parts, Tensor(h!)? utterance_losses, Tensor(i!)? sums, "
    "Tensor(j!)? stay, Tensor(k!)? gd) -> ()"
)
# The gradients of total and of the two losses, None for none -> in saved what layers_backward
# reads; sums, acc: the gradients of the output layer's weight (O,D) and bias (O), with O = V+K
# rounded up. work as the forward has left it.
declare(
    "pruned_step_rows_backward(Tensor? grad_total, Tensor? grad_simple, Tensor? grad_pruned, "
    "Tensor targets, Tensor logit_lengths, Tensor target_lengths, Tensor start, Tensor fields, "
    "Tensor(a!) saved, Tensor(b!) work, Tensor(c!) sums) -> ()"
)
# -> gradients of the inputs in their dtype, of the weights (V'+D+K',E) and (V'+D+K',P) of the
# layers that read each input in their dtype, None for what is not wanted; and in sums, behind the
# output layer's, of the biases (V'+D+K'), acc, of each. K' = K rounded up.
declare(
    "pruned_step_layers_backward(Tensor encoder, Tensor predictor, Tensor fields, "
    "Tensor(a!) saved, Tensor(b!)? grad_encoder, Tensor(c!)? grad_predictor, "
    "Tensor(d!)? encoder_weights, Tensor(e!)? predictor_weights, Tensor(f!) sums) -> ()"
)
_STEP_OPS = torch.ops.pruned_rnnt


class StepArguments(NamedTuple):
    """The fields of csrc/cuda/step/step_fields.cuh that Python fills in, by name."""

    N: int
    T: int
    W: int
    E: int
    P: int
    D: int
    V: int
    S: int
    padded_V: int
    K: int
    padded_K: int
    padded_O: int
    longest: int
    rows: int
    least_chunk_rows: int
    hidden_rows: int
    blank: int
    rnnt_type: int
    mode: int
    activation: int
    exact_bounds: bool
    differentiable: bool
    grads_in_forward: bool
    packed: bool
    cast_encoder: bool
    cast_predictor: bool
    reduction: int
    dtype: int
    exp_dtype: int
    am_parts: int
    lm_parts: int
    exp_multiple: int
    exp_together: int
    lm_only_scale: float
    delay_penalty: float
    fastemit_lambda: float
    clamp: float
    sigma: float
    simple_scale: float
    pruned_scale: float


class StepMemory(NamedTuple):
    """The fields that the library fills in: bytes of saved and work, elements of sums."""

    chunk_rows: int = 0
    saved_bytes: int = 0
    work_bytes: int = 0
    sums_size: int = 0


class StepCall(NamedTuple):
    """fields: the memory in which Python and the library share arguments and memory."""

    arguments: StepArguments
    memory: StepMemory
    fields: Tensor
    plan: StepPlan


class _FieldTable:
    """How the library stores the fields of a step.

    Raises:
        ImportError: its fields are not those of StepArguments and StepMemory.
    """

    def __init__(self) -> None:
        try:
            description: str = _STEP_OPS.pruned_step_fields.default()
        except NotImplementedError:
            description = ""
        kinds = dict(field.split(":") for field in description.split())
        ours = [*StepArguments._fields, *StepMemory._fields]
        if kinds.keys() != set(ours):
            raise ImportError(
                "pruned_rnnt's CUDA library was built from another version of the source: the "
                f"fields {sorted(kinds.keys() ^ set(ours))} of its pruned step and of the package "
                "differ. Build and install the package again."
            )
        names = list(kinds)
        self._values = {name: kind.split(",") for name, kind in kinds.items() if len(kind) > 1}
        self._packing = struct.Struct("".join("d" if kinds[x] == "d" else "q" for x in names))
        self._in_order = operator.itemgetter(*map(ours.index, names))
        self._memory = operator.itemgetter(*map(names.index, StepMemory._fields))

    def choice(self, field: str, value: object) -> int:
        return self._values[field].index(str(value).removeprefix("torch."))

    def call(self, arguments: StepArguments, plan: StepPlan) -> StepCall:
        """With the memory that the library asks for."""
        shared = bytearray(self._packing.size)
        self._packing.pack_into(shared, 0, *self._in_order((*arguments, *StepMemory())))
        fields = torch.frombuffer(shared, dtype=torch.int64)
        _STEP_OPS.pruned_step_layout.default(fields)
        memory = StepMemory(*self._memory(self._packing.unpack(shared)))
        return StepCall(arguments, memory, fields, plan)


# None without the library. Importing the package fails if the library is of another version.
FIELDS = _FieldTable() if has_native_kernel("pruned_step_forward", "cuda") else None


def has_native_step() -> bool:
    return FIELDS is not None


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
    gx, gy = new_outputs(2, saved, (N, T, W), acc)
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
    _STEP_OPS.pruned_step_forward.default(*given, *written)
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
    _STEP_OPS.pruned_step_rows_backward.default(*given, *buffers, sums)
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
    _STEP_OPS.pruned_step_layers_backward.default(*given, *gradients, sums)
    return gradients
