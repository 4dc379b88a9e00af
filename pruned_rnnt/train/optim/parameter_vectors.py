"""Base classes of optimisers that update many parameters as one vector.

A model has a thousand parameters, most of them small: a launch for each would take the host long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from pruned_rnnt.train.optim.conditional import Condition


class ClosureOptimiser(torch.optim.Optimizer):
    """A `ConditionalOptimiser` whose subclasses define `update` and `take_back`."""

    def update(self, condition: Condition) -> None:
        """Update the parameters by their gradients, and count the update."""
        raise NotImplementedError

    def take_back(self) -> None:
        """Subtract the last update, which did not apply, from the count of updates."""
        raise NotImplementedError

    @torch.no_grad()
    def step_if(self, applies: Tensor) -> None:
        """Update if the flag on the device is true; see `ConditionalOptimiser`."""
        self.update(Condition(applies))

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Compute the loss by `closure` if there is one, and update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update(Condition(None))
        return loss


class ParameterVector:
    """Sums over, and values for, each of the parameters whose elements are in one vector.

    Attributes:
        sizes_P: elements of each parameter.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.sizes_P = torch.tensor(sizes).to(parameters[0].device, non_blocking=True)
        self._total = sum(sizes)

    def sums(self, vector: Tensor) -> Tensor:
        """Sums over the elements of each parameter, (P,) in float32."""
        return torch.segment_reduce(vector.float(), "sum", lengths=self.sizes_P, unsafe=True)

    def each(self, values_P: Tensor) -> Tensor:
        """Repeat the value of each parameter for all of its elements."""
        return values_P.repeat_interleave(self.sizes_P, output_size=self._total)


def vector_of(tensors: Sequence[Tensor]) -> Tensor:
    """A new vector of the elements of all tensors."""
    vector: Tensor = _flatten_dense_tensors(tensors)
    # With a single tensor, the result would share its memory.
    return vector.clone() if len(tensors) == 1 else vector
