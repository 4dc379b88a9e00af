"""A batch for NeMo's joint, and its loss and gradients; the fixture model_of makes the model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SYMBOLS, DURATIONS = 5, [0, 1, 2, 3]
TARGETS = torch.tensor([[1, 2, 3], [3, 4, 0], [4, 2, 2]])
FRAMES, LENGTHS = torch.tensor([5, 4, 6]), torch.tensor([3, 2, 3])
Made = Callable[..., Any]


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Outputs of encoder (N, D, T + 1) and predictor (N, D, U + 1)."""
    generator = torch.Generator().manual_seed(2)
    shapes = (3, 7, 7), (3, 6, 4)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def loss_and_gradients(model: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    given = inputs(dtype)
    value = model.loss(model.joint(*given), TARGETS, FRAMES, LENGTHS)
    return [value.detach(), *torch.autograd.grad(value, [*given, *model.joint.parameters()])]
