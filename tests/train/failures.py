"""Failures for tests: out-of-memory errors, training that stops, delayed gradients."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pruned_rnnt.train.engine.bad_steps import TrainingStopped
from tests.tiny_corpus import speech_trainer, tiny_experiment

_MORE_THAN_ANY_MEMORY = 2**46


def run_out_of_memory(device: torch.device | str) -> None:
    """Raise the error of the device's allocator."""
    torch.empty(_MORE_THAN_ANY_MEMORY, device=device)


def check_training_stops(corpus: Path, run: Path, message: str, *overrides: str) -> None:
    """Train, and expect that training stops with a message that matches the pattern."""
    with pytest.raises(TrainingStopped, match=message):
        speech_trainer(tiny_experiment(corpus, run, *overrides)).run()


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
