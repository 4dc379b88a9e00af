"""The ops of the pruned step and the numbers that they take by name; axes as in step_library.py."""

from __future__ import annotations

import operator
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import LIBRARY
from pruned_rnnt.ops.common.native import has_native_kernel
from pruned_rnnt.ops.step.step_plan import StepPlan

# fields: StepArguments and StepMemory as int64 on the CPU; a tensor, because a list of numbers
# takes longer to pass. pruned_step_fields returns their names and types in the order of
# csrc/cuda/step/step_fields.cuh; pruned_step_layout fills in those of StepMemory.
LIBRARY.define("pruned_step_fields() -> str")
LIBRARY.define("pruned_step_layout(Tensor(a!) fields) -> ()")
# layers: weight and bias of five layers, or of eight with TDT; lengths: on the CPU (int32, int64)
# if rows are packed, else int32 on the device. saved, work: uint8 memory. -> gx, gy (N,T,W) acc,
# start (N,T) int32; total and parts: the weighted sum of the two losses and the losses, (N) and
# (2,N), or reduced, () and (2), then with the three of each utterance in utterance_losses (3,N).
# With grads_in_forward also what pruned_step_rows_backward computes; with durations also stay
# (N,T,W) and gd (N,T,W,K).
LIBRARY.define(
    "pruned_step_forward(Tensor encoder, Tensor predictor, Tensor[] layers, Tensor targets, "
    "Tensor logit_lengths, Tensor target_lengths, Tensor fields, int[] durations, "
    "Tensor(a!) saved, Tensor(b!) work, Tensor(c!) gx, Tensor(d!) gy, Tensor(e!) start, "
    "Tensor(f!) total, Tensor(g!) parts, Tensor(h!)? utterance_losses, Tensor(i!)? sums, "
    "Tensor(j!)? stay, Tensor(k!)? gd) -> ()"
)
# The gradients of total and of the two losses, None for none -> in saved what layers_backward
# reads; sums, acc: the gradients of the output layer's weight (O,D) and bias (O), with O = V+K
# rounded up. work as the forward has left it.
LIBRARY.define(
    "pruned_step_rows_backward(Tensor? grad_total, Tensor? grad_simple, Tensor? grad_pruned, "
    "Tensor targets, Tensor logit_lengths, Tensor target_lengths, Tensor start, Tensor fields, "
    "Tensor(a!) saved, Tensor(b!) work, Tensor(c!) sums) -> ()"
)
# -> gradients of the inputs in their dtype, of the weights (V'+D+K',E) and (V'+D+K',P) of the
# layers that read each input in their dtype, None for what is not wanted; and in sums, behind the
# output layer's, of the biases (V'+D+K'), acc, of each. K' = K rounded up.
LIBRARY.define(
    "pruned_step_layers_backward(Tensor encoder, Tensor predictor, Tensor fields, "
    "Tensor(a!) saved, Tensor(b!)? grad_encoder, Tensor(c!)? grad_predictor, "
    "Tensor(d!)? encoder_weights, Tensor(e!)? predictor_weights, Tensor(f!) sums) -> ()"
)
STEP_OPS = torch.ops.pruned_rnnt


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


class FieldTable:
    """How the library stores the fields of a step.

    Raises:
        ImportError: its fields are not those of StepArguments and StepMemory.
    """

    def __init__(self) -> None:
        try:
            description: str = STEP_OPS.pruned_step_fields.default()
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
        STEP_OPS.pruned_step_layout.default(fields)
        memory = StepMemory(*self._memory(self._packing.unpack(shared)))
        return StepCall(arguments, memory, fields, plan)


# None without the library. Importing the package fails if the library is of another version.
FIELDS = FieldTable() if has_native_kernel("pruned_step_forward", "cuda") else None


def has_native_step() -> bool:
    return FIELDS is not None
