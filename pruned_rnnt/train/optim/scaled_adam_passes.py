"""The passes of ScaledAdam over all elements of the parameters, in plain torch.

Axes: P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from pruned_rnnt.train.optim.conditional import Condition


class Rates(NamedTuple):
    """Numbers of one update.

    step: factor of the new direction in the change.
    change_decay, square_decay: of the running means.
    correction: of the mean square.
    max_scalar: limit of parameters of one element.
    """

    step: float
    change_decay: float
    square_decay: float
    correction: float
    eps: float
    max_scalar: float


class Update(NamedTuple):
    """change, square: moments of all parameters, one after the other. growth_P: change of the size,
    as a fraction of it; None for zero."""

    change: Tensor
    square: Tensor
    growth_P: Tensor | None
    rates: Rates
    condition: Condition


class Passes(Protocol):
    """The passes of one update, in the order of these methods.

    Attributes:
        sizes_P: elements of each parameter.
    """

    sizes_P: Tensor

    def start(self, condition: Condition) -> None:
        """Read the gradients; a missing one counts as zero."""

    def gradient_squares(self) -> Tensor:
        """(P,): sums of the squares of the gradients."""

    def value_gradients(self, factor: Tensor | None) -> Tensor:
        """(P,): sums of value * gradient. From here on the gradients are multiplied by `factor`."""

    def value_squares(self) -> Tensor:
        """(P,): sums of the squares of the values."""

    def set_rms(self, rms_P: Tensor) -> None:
        """Set the factor of the direction, until the next call; also called before `start`."""

    def update(self, update: Update) -> None:
        """Update the parameters and their moments."""


class PlainPasses:
    """The passes in plain torch, over copies of all values and gradients in one vector each.

    A model has a thousand parameters, most of them small: a launch for each would take the host
    long.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.sizes_P = torch.tensor(sizes).to(parameters[0].device, non_blocking=True)
        self._total = sum(sizes)
        self._parameters = list(parameters)
        self._scalars = [parameter for parameter in parameters if parameter.numel() == 1]
        self._gradient = self._values = parameters[0]

    def start(self, condition: Condition) -> None:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        # If the update is skipped: zeros change nothing, but infinity or NaN times zero would.
        self._gradient = condition.zero_(vector_of(gradients))

    def gradient_squares(self) -> Tensor:
        return self._sums(self._gradient.square())

    def value_gradients(self, factor: Tensor | None) -> Tensor:
        if factor is not None:
            torch._foreach_mul_([self._gradient], factor)
        self._values = vector_of(self._parameters)
        return self._sums(self._values * self._gradient)

    def value_squares(self) -> Tensor:
        return self._sums(self._values.square())

    def set_rms(self, rms_P: Tensor) -> None:
        self._rms = self._each(rms_P)

    def update(self, update: Update) -> None:
        change, square, growth_P, rates, condition = update
        gradient, values = self._gradient, self._values
        # Without these references, their memory is released after the update.
        self._gradient = self._values = self._parameters[0]
        condition.mul_(square, rates.square_decay)
        square.addcmul_(gradient, gradient, value=1 - rates.square_decay)
        if rates.correction < 1.0:
            spread = torch.div(square, rates.correction).sqrt_()
        else:
            spread = square.sqrt()
        direction = gradient.div_(spread.add_(rates.eps))
        condition.mul_(change, rates.change_decay)
        change.addcmul_(direction, self._rms, value=rates.step)
        if growth_P is not None:
            change.addcmul_(values, self._each(growth_P), value=1 - rates.change_decay)
        pieces = _unflatten_dense_tensors(condition.or_zeros(change), self._parameters)
        torch._foreach_add_(self._parameters, list(pieces))
        if self._scalars:
            torch._foreach_clamp_max_(self._scalars, rates.max_scalar)
            torch._foreach_clamp_min_(self._scalars, -rates.max_scalar)

    def _sums(self, vector: Tensor) -> Tensor:
        """Sums over the elements of each parameter, (P,) in float32."""
        return torch.segment_reduce(vector.float(), "sum", lengths=self.sizes_P, unsafe=True)

    def _each(self, values_P: Tensor) -> Tensor:
        """Repeat the value of each parameter for all of its elements."""
        return values_P.repeat_interleave(self.sizes_P, output_size=self._total)


def vector_of(tensors: Sequence[Tensor]) -> Tensor:
    """A new vector of the elements of all tensors."""
    vector: Tensor = _flatten_dense_tensors(tensors)
    # With a single tensor, the result would share its memory.
    return vector.clone() if len(tensors) == 1 else vector
