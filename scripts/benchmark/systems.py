"""The systems that are measured, and how each does the work of a case.

A system has a name, a version, and a function for every kind of case that it supports. The function
turns a case and its inputs into a Step, which runs forward and backward and returns the loss (mean
over utterances). A run leaves out systems whose packages are missing, and logs them.
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
    """Forward and backward of a loss, with new gradients in each call; only forward if no input of
    the case is differentiable."""

    def __init__(self, loss: Callable[[], Tensor], inputs: Inputs, *parameters: Tensor):
        self._loss = loss
        self._device = inputs.first.device.type
        candidates = (inputs.first, inputs.second, *parameters)
        self._leaves = [x for x in candidates if x is not None and x.requires_grad]
        self.autocast(None)

    def autocast(self, dtype: torch.dtype | None) -> None:
        """Set the dtype of autocast in the forward pass. The context is created once, not in every
        call."""
        self._context = torch.autocast(self._device, dtype, enabled=dtype is not None)

    def clear(self) -> None:
        """Free the gradients of the last call."""
        for leaf in self._leaves:
            leaf.grad = None

    def __call__(self) -> Tensor:
        self.clear()
        with self._context:
            value = self._loss()
        if self._leaves:
            value.backward()
        return value.detach()


def warm_up(step: Callable[[], object]) -> None:
    """Three calls on a side stream, which torch requires before the capture of a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)


class ReplayedStep:
    """A step captured in a CUDA graph. Calling it replays the graph."""

    def __init__(self, step: Step):
        self._step = step
        warm_up(step)
        step.clear()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._value = step()

    def clear(self) -> None:
        """Do nothing: the gradients are in the graph's memory."""

    def __call__(self) -> Tensor:
        self._graph.replay()
        return self._value


Builder = Callable[[Case, Inputs], Step]


@dataclass(frozen=True)
class System:
    """kinds: builders by kind of case. module: the module to import. environment: variables of its
    process on the CPU. replayed: the step is captured in a CUDA graph."""

    name: str
    module: str
    kinds: dict[str, Builder]
    environment: dict[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu", "cuda")
    replayed: bool = False

    def version(self) -> str:
        try:
            return importlib.metadata.version(self.module)
        except importlib.metadata.PackageNotFoundError:
            return str(getattr(importlib.import_module(self.module), "__version__", "source"))

    def available(self) -> str | None:
        """None if the system can run here, otherwise the reason why not."""
        try:
            importlib.import_module(self.module)
        except (ImportError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return None


def end_boundary(inputs: Inputs) -> Tensor:
    """(N,4) int64 [0, 0, U_n, T_n]: the lengths in the format of k2 and fast_rnnt."""
    zeros = torch.zeros_like(inputs.logit_lengths)
    return torch.stack([zeros, zeros, inputs.target_lengths, inputs.logit_lengths], dim=1).long()
