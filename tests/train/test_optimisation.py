"""Optimisers, learning rate schedules, parameter averages and random states."""

from __future__ import annotations

import random
from typing import Any

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
        (ScheduleConfig(kind="eden", warm_up_steps=4, eden_steps=1e9), 0, 0.1),
        (ScheduleConfig(kind="eden", warm_up_steps=4, eden_steps=1e9), 1, 0.325),
        (ScheduleConfig(kind="eden", warm_up_steps=4, eden_steps=1e9), 4, 1.0),
        (
            ScheduleConfig(kind="eden", warm_up_steps=4, eden_steps=1e9, eden_warm_up_start=0.5),
            2,
            0.75,
        ),
    ],
)
def test_schedule(config: ScheduleConfig, step: int, expected: float) -> None:
    assert learning_rate_scale(config, step, 0, total_steps=100) == pytest.approx(expected)


def test_eden_falls_with_epochs() -> None:
    config = ScheduleConfig(kind="eden", warm_up_steps=0, eden_epochs=2.0)
    assert learning_rate_scale(config, 0, 2, 100) == pytest.approx(2**-0.25)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"final_scale": 0.0}, "0 < x <= 1"),
        ({"warm_up_steps": -1}, "needs at least 0"),
        ({"warm_up_steps": None}, "schedule.warm_up_steps is None, needs a whole number"),
        ({"kind": "linear"}, "schedule.kind is 'linear', needs one of cosine, exponential"),
        ({"eden_warm_up_start": 0.0}, "eden_warm_up_start is 0.0, needs 0 < x <= 1"),
    ],
)
def test_invalid_schedule_is_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduleConfig(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "sgd"}, "optimiser.name is 'sgd', needs one of adamw, adamw_8bit, scaled_adam"),
        ({"betas": (0.9,)}, r"optimiser.betas is \(0.9,\), needs a list of 2 values"),
        ({"betas": 0.9}, "optimiser.betas is 0.9, needs a list of 2 values"),
        ({"betas": ("a", "b")}, "needs a number"),
        ({"learning_rate": "1e-3"}, "optimiser.learning_rate is '1e-3', needs a number"),
    ],
)
def test_invalid_optimiser_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimiserConfig(**changes)


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


def test_allocated_moments_of_adamw_change_no_update() -> None:
    torch.manual_seed(0)
    model, plain = nn.Linear(4, 1), nn.Linear(4, 1)
    plain.load_state_dict(model.state_dict())
    optimisers = [build_optimiser(each, OptimiserConfig()) for each in (model, plain)]
    optimisers[1].state.clear()  # torch's own start: without moments
    for each, optimiser in zip((model, plain), optimisers, strict=True):
        each(torch.ones(2, 4)).sum().backward()
        optimiser.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("gaps", [False, True])
def test_adamw_on_a_cpu_equals_torch_in_any_memory_order(gaps: bool) -> None:
    """torch's fused update, which is for parameters without gaps, reads memory as it lies."""

    def problem() -> nn.ParameterList:
        values = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
        return nn.ParameterList([values[:, :7] if gaps else values[:, :7].contiguous()])

    model, plain = problem(), problem()
    config = OptimiserConfig()
    ours = build_optimiser(model, config)
    assert ours.defaults["fused"] != gaps
    wanted = torch.optim.AdamW(
        plain.parameters(),
        config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=False,
    )
    for step in range(4):
        columns_first = torch.randn(7, 5, generator=torch.Generator().manual_seed(step)).t()
        model[0].grad = columns_first if step % 2 else columns_first.contiguous()
        plain[0].grad = columns_first
        ours.step()
        wanted.step()
        state = ours.state_dict()
        for moments in state["state"].values():
            moments["exp_avg"] = moments["exp_avg"].t().contiguous().t()
        ours.load_state_dict(state)
    torch.testing.assert_close(model[0], plain[0])


@pytest.mark.parametrize("saved", [False, True])
def test_adamw_keeps_the_update_of_its_own_device(saved: bool) -> None:
    """A run of a CPU may continue on a GPU, where steps can only be skipped in the fused update."""
    optimiser = build_optimiser(nn.Linear(2, 2), OptimiserConfig())
    state = optimiser.state_dict()
    for group in state["param_groups"]:
        group["fused"] = saved
    optimiser.load_state_dict(state)
    assert all(group["fused"] for group in optimiser.param_groups)


def test_scaled_adam_is_not_clipped_by_the_trainer() -> None:
    assert OptimiserConfig(clip_norm=3.0).norm_limit == 3.0
    assert OptimiserConfig(name="scaled_adam", clip_norm=3.0).norm_limit == 0.0


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
        if key in ("exp_avg", "exp_avg_sq", "change", "square")
    }
    assert len(before) == 4
    model(torch.ones(2, 4, device=device)).sum().backward()
    optimiser.step()
    after = {id(value) for state in optimiser.state.values() for value in state.values()}
    assert before <= after


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_averages_of_half_precision_move(dtype: torch.dtype) -> None:
    """A hundredth of the difference is less than the spacing of bfloat16."""
    model, exact = nn.Linear(1, 1, bias=False).to(dtype), nn.Linear(1, 1, bias=False)
    averages = []
    for each in (model, exact):
        nn.init.ones_(each.weight)
        averages.append(RunningAverage(each, decay=0.99))
        nn.init.constant_(each.weight, 1.125)
    for _ in range(2000):
        for average in averages:
            average.update()
    half, full = (average.state_dict()["weight"] for average in averages)
    assert float(full) > 1.12
    assert torch.equal(half, full)
    nn.init.constant_(model.weight, 3.0)
    for _ in range(2):
        with averages[0].applied():
            assert model.weight.item() == float(full.to(dtype))
        assert model.weight.item() == 3.0
    assert torch.equal(averages[0].state_dict()["weight"], full)
    averages[0].load_state_dict({"weight": torch.tensor([[1.5]], dtype=dtype)}, 5)
    assert averages[0].state_dict()["weight"].item() == 1.5


def test_wider_averages_are_moved_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 copy of all parameters at once would double the memory of the average."""
    model = nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2))
    average = RunningAverage(model, decay=0.5)
    moved: list[Tensor] = []
    lerp = torch._foreach_lerp_

    def record(averages: list[Tensor], live: list[Tensor], weight: float) -> None:
        moved.extend(live)
        lerp(averages, live, weight)

    monkeypatch.setattr(torch, "_foreach_lerp_", record)
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(4.0)
    before = average.state_dict()["0.weight"].clone()
    average.update()
    assert [id(each) for each in moved] == [id(each) for each in model[1].parameters()]
    weight = 1 - 2 / 11
    torch.testing.assert_close(
        average.state_dict()["0.weight"], before.lerp(torch.tensor(4.0), weight)
    )


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


def test_frozen_parameters_are_their_own_average() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    average = RunningAverage(model, decay=0.5)
    assert [tuple(each.shape) for each in average.tensors()] == [(1, 3), (1,)]
    average.update()
    state = average.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert torch.equal(state["0.weight"], model[0].weight)


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


@pytest.mark.parametrize(
    ("device", "used"), [("cuda:1", "cuda:1"), ("cpu", "cuda"), (None, "cuda")]
)
def test_the_generator_is_that_of_the_model_s_gpu(
    device: str | None, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: dict[str, torch.Tensor] = {used: torch.tensor(3)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[str(device)])
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: states.update({str(device): state + 1})
    )
    of = None if device is None else torch.device(device)
    restore_random_state(capture_random_state(of), of)
    assert states == {used: torch.tensor(4)}
