"""Trouble at a place of the test's choice: the allocator's own errors, late gradients."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

_MORE_THAN_THERE_IS = 2**46


def run_out_of_memory(device: torch.device | str) -> None:
    """Raises what the device's allocator raises."""
    torch.empty(_MORE_THAN_THERE_IS, device=device)


class _AsItIs(torch.autograd.Function):
    """Lets a tensor through; what happens to its gradient is a subclass's matter."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()


class FailInBackward(_AsItIs):
    """Its gradient does not fit into memory."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        run_out_of_memory(gradient.device)
        return gradient


class SlowGradient(_AsItIs):
    """Its gradient comes so late that the other gradients are long sent."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(0.2)
        return gradient
