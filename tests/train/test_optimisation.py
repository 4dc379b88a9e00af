"""Optimisers, learning rate schedules, parameter averages and random states."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pruned_rnnt.train.engine.average import RunningAverage, mean_of_states
from pruned_rnnt.train.engine.random_state import (
    capture_random_state,
    restore_random_state,
    seed_everything,
)
from pruned_rnnt.train.optim.optimiser import OptimiserConfig, build_optimiser
from pruned_rnnt.train.optim.scaled_adam import ScaledAdam
from pruned_rnnt.train.optim.schedule import ScheduleConfig, learning_rate_scale


@pytest.mark.parametrize(
    ("config", "step", "expected"),
    [
        (ScheduleConfig(warm_up_steps=9), 0, 0.1),
        (ScheduleConfig(warm_up_steps=9), 8, 0.9),
        (ScheduleConfig(warm_up_steps=9), 9, 1.0),
        (ScheduleConfig(warm_up_steps=0, final_scale=0.2), 50, 0.6),
        (ScheduleConfig(warm_up_steps=0, final_scale=0.2), 100, 0.2),
        (ScheduleConfig(warm_up_steps=0, final_scale=0.2), 1000, 0.2),
        (ScheduleConfig(kind="exponential", warm_up_steps=0, final_scale=0.01), 50, 0.1),
        (ScheduleConfig(kind="exponential", warm_up_steps=20, final_scale=0.01), 60, 0.1),
        (ScheduleConfig(kind="constant", warm_up_steps=3), 100, 1.0),
        (ScheduleConfig(kind="constant", warm_up_steps=3), 1, 0.5),
        (ScheduleConfig(kind="eden", warm_up_steps=0, eden_steps=10), 0, 1.0),
        (ScheduleConfig(kind="eden", warm_up_steps=0, eden_steps=10), 10, 2**-0.25),
        (ScheduleConfig(kind="eden", warm_up_steps=4, eden_steps=1e9), 1, 0.7),
    ],
)
def test_schedule(config: ScheduleConfig, step: int, expected: float) -> None:
    assert learning_rate_scale(config, step, 0, total_steps=100) == pytest.approx(expected)


def test_eden_falls_with_epochs() -> None:
    config = ScheduleConfig(kind="eden", warm_up_steps=0, eden_epochs=2.0)
    assert learning_rate_scale(config, 0, 2, 100) == pytest.approx(2**-0.25)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"final_scale": 0.0}, "0 < x <= 1"), ({"warm_up_steps": -1}, "needs at least 0")],
)
def test_invalid_schedule_is_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduleConfig(**changes)  # type: ignore[arg-type]


def test_weight_decay_applies_to_matrices_only() -> None:
    model = nn.Linear(3, 2)
    groups = build_optimiser(model, OptimiserConfig(weight_decay=0.5)).param_groups
    assert groups[0]["params"] == [model.weight]
    assert groups[0]["weight_decay"] == 0.5
    assert groups[1]["params"] == [model.bias]
    assert groups[1]["weight_decay"] == 0.0


@pytest.mark.parametrize("name", ["adamw", "scaled_adam"])
def test_optimisers_fit_a_line_and_continue_from_their_state(name: str) -> None:
    def problem() -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        config = OptimiserConfig(name=name, learning_rate=0.03)  # type: ignore[arg-type]
        return model, build_optimiser(model, config)

    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    targets = inputs @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]) + 0.7

    def advance(model: nn.Linear, optimiser: torch.optim.Optimizer, steps: int) -> float:
        for _ in range(steps):
            optimiser.zero_grad()
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimiser.step()
        return loss.item()

    model, optimiser = problem()
    first = advance(model, optimiser, 1)
    assert advance(model, optimiser, 699) < 0.01 * first

    straight, optimiser = problem()
    advance(straight, optimiser, 6)
    half, optimiser = problem()
    advance(half, optimiser, 3)
    resumed, other = problem()
    resumed.load_state_dict(half.state_dict())
    other.load_state_dict(optimiser.state_dict())
    advance(resumed, other, 3)
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu])])
@pytest.mark.parametrize("name", ["adamw", "scaled_adam"])
def test_first_update_allocates_no_state(name: str, device: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1).to(device)
    optimiser = build_optimiser(model, OptimiserConfig(name=name))  # type: ignore[arg-type]
    before = {
        id(value)
        for state in optimiser.state.values()
        for key, value in state.items()
        if key in ("exp_avg", "exp_avg_sq", "mean", "square")
    }
    assert len(before) == 4
    model(torch.ones(2, 4, device=device)).sum().backward()
    # torch's own start: without moments.
    plain = nn.Linear(4, 1).to(device)
    plain.load_state_dict(model.state_dict())
    plain(torch.ones(2, 4, device=device)).sum().backward()
    lazy = build_optimiser(plain, OptimiserConfig(name=name))  # type: ignore[arg-type]
    lazy.state.clear()
    optimiser.step()
    lazy.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    after = {id(value) for state in optimiser.state.values() for value in state.values()}
    assert before <= after


def scaled_adam_step(
    parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int
) -> None:
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


def test_scaled_adam_matches_its_formulas_for_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pruned_rnnt.train.optim.scaled_adam._BUCKET_ELEMENTS", 20)
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
    optimiser = ScaledAdam(parameters, lr=0.02)
    for step in range(6):
        for index, parameter in enumerate(parameters):
            # This one lacks a gradient in some steps, and so makes fewer steps.
            if index == 3 and step % 3 == 1:
                parameter.grad = None
                continue
            parameter.grad = torch.randn(shapes[index], generator=generator)
            steps[index] += 1
            scaled_adam_step(expected[index], parameter.grad.double(), states[index], steps[index])
        optimiser.step()
    for parameter, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach().double(), value, rtol=2e-5, atol=1e-12)


def test_scaled_adam_steps_are_proportional_to_the_parameter() -> None:
    changes = []
    for size in (1.0, 100.0):
        parameter = nn.Parameter(torch.linspace(-1, 1, 10) * size)
        before = parameter.detach().clone()
        optimiser = ScaledAdam([parameter], lr=0.01, max_rms=1e9)
        parameter.grad = torch.randn(10, generator=torch.Generator().manual_seed(0))
        optimiser.step()
        changes.append((parameter.detach() - before) / size)
    torch.testing.assert_close(changes[0], changes[1])
    assert changes[0].abs().max() > 1e-3


def test_scaled_adam_keeps_the_rms_within_bounds() -> None:
    def size_after(max_rms: float) -> float:
        parameter = nn.Parameter(torch.ones(10))
        optimiser = ScaledAdam([parameter], lr=0.001, size_lr=10.0, max_rms=max_rms)
        for _ in range(100):
            parameter.grad = -parameter.detach().clone()
            optimiser.step()
        return float(parameter.detach().square().mean().sqrt())

    assert size_after(1e9) > 2.5
    assert 1.5 < size_after(1.5) < 1.7


def test_running_average_matches_its_formula_and_is_swapped_in() -> None:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.0)
    average = RunningAverage(model, decay=0.5)
    expected = 0.0
    for update in range(1, 20):
        with torch.no_grad():
            model.weight.fill_(float(update))
        average.update()
        decay = min(0.5, (1 + update) / (10 + update))
        expected = decay * expected + (1 - decay) * update
    with average.applied():
        assert model.weight.item() == pytest.approx(expected)
    assert model.weight.item() == 19.0
    assert float(average.state_dict()["weight"]) == pytest.approx(expected)

    copy = RunningAverage(model, decay=0.5)
    copy.load_state_dict(average.state_dict(), average.updates)
    average.update()
    copy.update()
    assert torch.equal(copy.state_dict()["weight"], average.state_dict()["weight"])


def test_shared_module_is_averaged_once() -> None:
    shared = nn.Linear(1, 1)
    model = nn.ModuleDict({"one": shared, "two": shared})
    average = RunningAverage(model, decay=0.5)
    before = shared.weight.item()
    with torch.no_grad():
        shared.weight.add_(1.0)
    average.update()
    with average.applied():
        # The first update keeps 2/11 of the old value.
        assert shared.weight.item() == pytest.approx(before + 9 / 11)
    assert shared.weight.item() == pytest.approx(before + 1)
    state = average.state_dict()
    assert torch.equal(state["one.weight"], state["two.weight"])


def test_mean_of_states() -> None:
    states = [
        {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(1)},
        {"w": torch.tensor([3.0, 6.0]), "n": torch.tensor(2)},
    ]
    mean = mean_of_states(states)
    assert mean["w"].tolist() == [2.0, 4.0]
    assert mean["n"].item() == 2
    with pytest.raises(ValueError, match="different models: 'w'"):
        mean_of_states([{"w": torch.zeros(3)}, {"w": torch.zeros(2)}])
    with pytest.raises(ValueError, match="nothing to average"):
        mean_of_states([])


def test_random_states_continue_all_generators(tmp_path: object) -> None:
    def draw() -> list[float]:
        return [
            random.random(),
            random.gauss(0, 1),
            float(np.random.rand()),  # noqa: NPY002
            float(np.random.randn()),  # noqa: NPY002
            float(torch.rand(())),
        ]

    seed_everything(3)
    first = draw()
    state = capture_random_state()
    expected = draw()
    path = f"{tmp_path}/state.pt"
    torch.save(state, path)
    draw()
    restore_random_state(torch.load(path, weights_only=True))
    assert draw() == expected
    seed_everything(3)
    assert draw() == first
