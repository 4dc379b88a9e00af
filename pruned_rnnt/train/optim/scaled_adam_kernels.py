"""ScaledAdam's passes over all parameters, as three kernels.

    sums     values, gradients -> sums of value * gradient, gradient^2 and value^2 of each block
    reduce   these -> the sums of each parameter
    update   values, change and square in place

A block is up to 2048 elements of one parameter, so that each program has one parameter:

    parameter   0       0       0    1  2       2     ...
    block     [....]  [....]  [..]  [] [....]  [...]

Parameters and gradients are read where they are, from tables of addresses; torch would copy them
into one vector. The formulas are those of `scaled_adam`.

Axes: P parameters, B blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product

import torch
import triton.language as tl
from torch import Tensor

from pruned_rnnt.model.kernels.launch import kernel
from pruned_rnnt.model.kernels.variants import compiled_together
from pruned_rnnt.train.optim.conditional import Condition
from pruned_rnnt.train.optim.scaled_adam_passes import Update

_BLOCK = 2048
_WARPS = 8
_SUMS = 3
# Blocks of a parameter that the reduction reads together.
_REDUCED = 128


@kernel()
def _sums_kernel(
    values_ptr,
    gradients_ptr,
    parameters_ptr,
    starts_ptr,
    sizes_ptr,
    out_ptr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    parameter = tl.load(parameters_ptr + block)
    element = tl.load(starts_ptr + block) + tl.arange(0, BLOCK)
    inside = element < tl.load(sizes_ptr + parameter)
    value_ptr = tl.load(values_ptr + parameter).to(tl.pointer_type(tl.float32))
    gradient_ptr = tl.load(gradients_ptr + parameter).to(tl.pointer_type(tl.float32))
    value = tl.load(value_ptr + element, mask=inside, other=0.0)
    gradient = tl.load(gradient_ptr + element, mask=inside, other=0.0)
    out = out_ptr + block * 3
    tl.store(out, tl.sum(value * gradient, axis=0))
    tl.store(out + 1, tl.sum(gradient * gradient, axis=0))
    tl.store(out + 2, tl.sum(value * value, axis=0))


@kernel("parameters")
def _reduce_kernel(sums_ptr, first_ptr, out_ptr, parameters, BLOCK: tl.constexpr):
    parameter = tl.program_id(0)
    which = tl.program_id(1)
    first = tl.load(first_ptr + parameter)
    last = tl.load(first_ptr + parameter + 1)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(first, last, BLOCK):
        block = start + tl.arange(0, BLOCK)
        total += tl.load(sums_ptr + block * 3 + which, mask=block < last, other=0.0)
    tl.store(out_ptr + which * parameters + parameter, tl.sum(total, axis=0))


@kernel("rms_ptr", "growth_ptr", "factor_ptr", "applies_ptr", "settings_ptr")
def _update_kernel(
    values_ptr,
    gradients_ptr,
    parameters_ptr,
    starts_ptr,
    sizes_ptr,
    offsets_ptr,
    change_ptr,
    square_ptr,
    rms_ptr,
    growth_ptr,
    factor_ptr,
    applies_ptr,
    settings_ptr,
    HAS_GROWTH: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_FLAG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    parameter = tl.load(parameters_ptr + block)
    size = tl.load(sizes_ptr + parameter)
    element = tl.load(starts_ptr + block) + tl.arange(0, BLOCK)
    counted = size
    if HAS_FLAG:
        counted = tl.where(tl.load(applies_ptr) != 0, size, 0)
    inside = element < counted
    value_ptr = tl.load(values_ptr + parameter).to(tl.pointer_type(tl.float32)) + element
    gradient_ptr = tl.load(gradients_ptr + parameter).to(tl.pointer_type(tl.float32))
    place = tl.load(offsets_ptr + parameter) + element
    gradient = tl.load(gradient_ptr + element, mask=inside, other=0.0)
    if HAS_FACTOR:
        gradient *= tl.load(factor_ptr)
    square = tl.load(square_ptr + place, mask=inside, other=0.0)
    square = square * tl.load(settings_ptr + 2) + gradient * gradient * tl.load(settings_ptr + 3)
    tl.store(square_ptr + place, square, mask=inside)
    spread = tl.sqrt(square / tl.load(settings_ptr + 4)) + tl.load(settings_ptr + 5)
    change = tl.load(change_ptr + place, mask=inside, other=0.0) * tl.load(settings_ptr + 1)
    change += gradient / spread * tl.load(rms_ptr + parameter) * tl.load(settings_ptr)
    value = tl.load(value_ptr, mask=inside, other=0.0)
    if HAS_GROWTH:
        change += value * (tl.load(growth_ptr + parameter) * tl.load(settings_ptr + 6))
    tl.store(change_ptr + place, change, mask=inside)
    value += change
    limit = tl.load(settings_ptr + 7)
    limited = tl.minimum(tl.maximum(value, -limit), limit)
    tl.store(value_ptr, tl.where(size == 1, limited, value), mask=inside)


class FusedPasses:
    """`Passes` by kernels, for contiguous parameters of one device in float32."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._device = parameters[0].device
        sizes = [parameter.numel() for parameter in parameters]
        blocks = [-(-size // _BLOCK) for size in sizes]
        self._owners_B = self._table(
            [place for place, count in enumerate(blocks) for _ in range(count)]
        )
        self._starts_B = self._table([_BLOCK * k for count in blocks for k in range(count)])
        self.sizes_P = self._table(sizes)
        self._offsets_P = self._table([0, *accumulate(sizes)][:-1])
        self._first_P = self._table([0, *accumulate(blocks)])
        self._gradients: list[Tensor] = []
        self._rms_P = self._sums_3P = torch.empty(0)
        self._factor: Tensor | None = None
        self._places: tuple[Tensor, ...] = ()
        if self._device.type == "cuda":
            with compiled_together(self._device):
                self.call_usual_kernels()

    def call_usual_kernels(self) -> None:
        """Call the usual variants, with numbers that mean nothing, where they are collected and not
        launched: with and without growth, and before and after clipping has seen enough steps."""
        numbers = torch.empty(1, device=self._device)
        places = (self._first_P, self._first_P, self._owners_B, self._starts_B, self.sizes_P)
        flag = torch.empty(1, dtype=torch.uint8, device=self._device)
        _sums_kernel((1,), *places, numbers, _BLOCK, num_warps=_WARPS)
        _reduce_kernel((1,), numbers, self._first_P, numbers, self.sizes_P.numel(), _REDUCED)
        for growth, factor in product((None, numbers), repeat=2):
            _update_kernel(
                (1,),
                *places,
                self._offsets_P,
                *[numbers] * 3,
                growth,
                factor,
                flag,
                numbers,
                growth is not None,
                factor is not None,
                True,
                _BLOCK,
                num_warps=_WARPS,
            )

    def _table(self, numbers: Sequence[int]) -> Tensor:
        table = torch.tensor(numbers, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        return table.to(self._device, non_blocking=True)

    def start(self, condition: Condition) -> None:
        # Kept until `update` has read them.
        self._gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad.float().contiguous()
            for p in self._parameters
        ]
        count, blocks = len(self._parameters), self._owners_B.numel()
        values, gradients = (
            [x.data_ptr() for x in each] for each in (self._parameters, self._gradients)
        )
        # Both begin at multiples of 16 bytes, for which the kernels are compiled.
        between = [0] * (count % 2)
        table = self._table([*values, *between, *gradients])
        values_P, gradients_P = table[:count], table[-count:]
        self._places = (values_P, gradients_P, self._owners_B, self._starts_B, self.sizes_P)
        sums_B3 = torch.empty((blocks, _SUMS), device=self._device)
        self._sums_3P = torch.empty((_SUMS, count), device=self._device)
        _sums_kernel((blocks,), *self._places, sums_B3, _BLOCK, num_warps=_WARPS)
        _reduce_kernel((count, _SUMS), sums_B3, self._first_P, self._sums_3P, count, _REDUCED)

    def gradient_squares(self) -> Tensor:
        return self._sums_3P[1]

    def value_gradients(self, factor: Tensor | None) -> Tensor:
        self._factor = factor
        return self._sums_3P[0] if factor is None else self._sums_3P[0] * factor

    def value_squares(self) -> Tensor:
        return self._sums_3P[2]

    def set_rms(self, rms_P: Tensor) -> None:
        self._rms_P = rms_P

    def update(self, update: Update) -> None:
        change, square, growth_P, rates, condition = update
        numbers = [
            rates.step,
            rates.change_decay,
            rates.square_decay,
            1 - rates.square_decay,
            rates.correction,
            rates.eps,
            1 - rates.change_decay,
            rates.max_scalar,
        ]
        settings = torch.tensor(
            numbers, dtype=torch.float32, pin_memory=self._device.type == "cuda"
        )
        applies = condition.applies
        _update_kernel(
            (self._owners_B.numel(),),
            *self._places,
            self._offsets_P,
            change,
            square,
            self._rms_P,
            growth_P,
            self._factor,
            None if applies is None else applies.view(torch.uint8),
            settings.to(self._device, non_blocking=True),
            growth_P is not None,
            self._factor is not None,
            applies is not None,
            _BLOCK,
            num_warps=_WARPS,
        )
        self._gradients = []
