"""ScaledAdam by the formulas of its paper, and its state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from pruned_rnnt.train.optim.paper_scaled_adam import PaperScaledAdam


def plain_step(parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int) -> None:
    """The formulas of the module's docstring for one parameter, in float64."""
    lr, beta1, beta2, eps, size_lr = 0.02, 0.9, 0.98, 1e-8, 0.1
    rms = parameter.square().mean().sqrt()
    floor = 0.1 if parameter.numel() == 1 else 1e-5
    r = min(max(float(rms), floor), 3.0)
    scaled = gradient * r
    state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * scaled
    state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * scaled**2
    size_gradient = (gradient * parameter).sum()
    state["ms"] = beta2 * state.get("ms", 0) + (1 - beta2) * size_gradient
    state["vs"] = beta2 * state.get("vs", 0) + (1 - beta2) * size_gradient**2
    m, v = state["m"] / (1 - beta1**step), state["v"] / (1 - beta2**step)
    ms, vs = state["ms"] / (1 - beta2**step), state["vs"] / (1 - beta2**step)
    growth = min(max(-size_lr * lr * float(ms / (vs.sqrt() + eps)), -0.1), 0.1)
    if parameter.numel() == 1 or (rms < floor and growth < 0) or (rms > 3.0 and growth > 0):
        growth = 0.0
    parameter += -lr * r * m / (v.sqrt() + eps) + growth * parameter


def test_matches_its_formulas_for_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pruned_rnnt.train.optim.paper_scaled_adam._BUCKET_ELEMENTS", 20)
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (1,), (), (5,), (2, 3, 2), (17,), (4, 1)]
    sizes = [1.0, 1e-3, 2.0, 1e-7, 30.0, 1.0, 0.5]
    parameters = [
        nn.Parameter(size * torch.randn(shape, generator=generator))
        for shape, size in zip(shapes, sizes, strict=True)
    ]
    expected = [p.detach().double() for p in parameters]
    states: list[dict[str, Tensor]] = [{} for _ in parameters]
    steps = [0] * len(parameters)
    optimiser = PaperScaledAdam(parameters, lr=0.02)
    for step in range(6):
        for index, parameter in enumerate(parameters):
            # This one lacks a gradient in some steps, and so makes fewer steps.
            if index == 3 and step % 3 == 1:
                parameter.grad = None
                continue
            parameter.grad = torch.randn(shapes[index], generator=generator)
            steps[index] += 1
            plain_step(expected[index], parameter.grad.double(), states[index], steps[index])
        optimiser.step()
    for parameter, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach().double(), value, rtol=2e-5, atol=1e-12)


def advance(model: nn.Module, optimiser: PaperScaledAdam, steps: range) -> list[Tensor]:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimiser.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_loaded_state_replaces_the_present_one() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimiser = PaperScaledAdam(model.parameters(), lr=0.02)
    advance(model, optimiser, range(3))
    saved = copy.deepcopy((model.state_dict(), optimiser.state_dict()))
    expected = advance(model, optimiser, range(3, 6))
    model.load_state_dict(saved[0])
    optimiser.load_state_dict(copy.deepcopy(saved[1]))
    assert all(map(torch.equal, advance(model, optimiser, range(3, 6)), expected))
