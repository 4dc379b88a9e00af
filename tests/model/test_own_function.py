"""Autograd functions of the encoders with and without gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pruned_rnnt.model.own_function import applied


class _Cube(torch.autograd.Function):
    """x^3, and how often its backward pass has run."""

    backward_passes = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.square = x * x
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable()
        return ctx.square * x  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _Cube.backward_passes += 1
        return 3 * grad * ctx.square  # type: ignore[no-any-return]


def test_gradients_are_those_of_the_function() -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    before = _Cube.backward_passes
    applied(_Cube, x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 12.0]
    assert _Cube.backward_passes == before + 1


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference_has_the_values_and_keeps_nothing(context: Any) -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    with context():
        value = applied(_Cube, x)
    assert value.tolist() == [1.0, -8.0]
    assert not value.requires_grad
