"""The systems that are measured, and how each does the work of a case.

A system has a name, a version, and a function for every kind of case that it can do: from a case
and its inputs to a step, which runs forward and backward and returns the loss (mean over
utterances).
Systems whose packages are missing are left out of a run and named.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from scripts.benchmark.cases import Case, Inputs


class Step:
    """Forward and backward of a loss, with gradients made anew each time."""

    def __init__(self, loss: Callable[[], Tensor], inputs: Inputs, *parameters: Tensor):
        self._loss = loss
        self._leaves = [x for x in (inputs.first, inputs.second, *parameters) if x is not None]

    def clear(self) -> None:
        """Gives the gradients of the last run back."""
        for leaf in self._leaves:
            leaf.grad = None

    def __call__(self) -> Tensor:
        self.clear()
        value = self._loss()
        value.backward()
        return value.detach()


Builder = Callable[[Case, Inputs], Step]


@dataclass(frozen=True)
class System:
    """kinds: builders by kind of case. module: what must import. environment: of its process."""

    name: str
    module: str
    kinds: dict[str, Builder]
    environment: dict[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu", "cuda")

    def version(self) -> str:
        try:
            return importlib.metadata.version(self.module)
        except importlib.metadata.PackageNotFoundError:
            return str(getattr(importlib.import_module(self.module), "__version__", "source"))

    def available(self) -> str | None:
        """None if the system can run here, else why not."""
        try:
            importlib.import_module(self.module)
        except (ImportError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return None


def end_boundary(inputs: Inputs) -> Tensor:
    """(N,4) int64 [0, 0, U_n, T_n], as k2 and fast_rnnt want the lengths."""
    zeros = torch.zeros_like(inputs.logit_lengths)
    return torch.stack([zeros, zeros, inputs.target_lengths, inputs.logit_lengths], dim=1).long()
