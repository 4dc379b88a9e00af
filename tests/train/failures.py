"""Real out-of-memory errors, of the allocator itself, at a place of the test's choice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_MORE_THAN_THERE_IS = 2**46


def run_out_of_memory(device: torch.device | str) -> None:
    """Raises what the device's allocator raises."""
    torch.empty(_MORE_THAN_THERE_IS, device=device)


class FailInBackward(torch.autograd.Function):
    """Lets a tensor through; its gradient does not fit into memory."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        run_out_of_memory(gradient.device)
        return gradient
