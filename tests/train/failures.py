"""Failures for tests: out-of-memory errors of the allocator, delayed gradients."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

_MORE_THAN_ANY_MEMORY = 2**46


def run_out_of_memory(device: torch.device | str) -> None:
    """Raise the error of the device's allocator."""
    torch.empty(_MORE_THAN_ANY_MEMORY, device=device)


class _Identity(torch.autograd.Function):
    """Returns a copy; subclasses define backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()


class FailInBackward(_Identity):
    """Runs out of memory in backward."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        run_out_of_memory(gradient.device)
        return gradient


class SlowGradient(_Identity):
    """Delays its gradient until the other gradients are sent."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(0.2)
        return gradient
