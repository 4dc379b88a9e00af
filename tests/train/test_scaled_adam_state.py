"""ScaledAdam changes parameters in proportion to their size, up to a limit of the size. It stores
its moments in vectors, but saves and loads them per parameter.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pruned_rnnt.train.optim.scaled_adam import ScaledAdam


def advance(model: nn.Module, optimiser: ScaledAdam, steps: range) -> list[torch.Tensor]:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(parameter.dtype)
            if step % 7 == 0:  # clipped, after the first ten steps
                parameter.grad *= 50.0
        optimiser.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(("steps", "more"), [(3, 3), (7, 8), (18, 5), (95, 20)])
def test_loaded_state_replaces_the_present_one(steps: int, more: int) -> None:
    """At a place between two changes of the sizes, and between two estimates of the median."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimiser = ScaledAdam(model.parameters(), lr=0.02)
    advance(model, optimiser, range(steps))
    saved = copy.deepcopy((model.state_dict(), optimiser.state_dict()))
    rest = range(steps, steps + more)
    expected = advance(model, optimiser, rest)
    # Restored into an optimiser that is already in use.
    model.load_state_dict(saved[0])
    optimiser.load_state_dict(copy.deepcopy(saved[1]))
    assert all(map(torch.equal, advance(model, optimiser, rest), expected))
    states = optimiser.state_dict()["state"]
    assert [state["change"].shape for state in states.values()] == [p.shape for p in expected]
    assert optimiser.param_groups[0]["step"] == steps + more


def test_state_of_an_older_version_is_refused() -> None:
    model = nn.Linear(3, 1)
    optimiser = ScaledAdam(model.parameters())
    state = optimiser.state_dict()
    for of_parameter in state["state"].values():
        of_parameter["mean"] = of_parameter.pop("change")
    with pytest.raises(ValueError, match="not from this version's scaled_adam"):
        ScaledAdam(model.parameters()).load_state_dict(state)


def test_added_parameters_are_updated() -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimiser = ScaledAdam([first])
    optimiser.add_param_group({"params": [second]})
    first.grad, second.grad = torch.ones(3), torch.ones(2)
    optimiser.step()
    assert first.max() < 1
    assert second.max() < 1


def test_gradients_are_not_modified() -> None:
    model = nn.Linear(3, 1, bias=False)
    optimiser = ScaledAdam(model.parameters(), lr=0.02)
    model.weight.grad = torch.tensor([[1.0, -2.0, 3.0]])
    optimiser.step()
    assert model.weight.grad.tolist() == [[1.0, -2.0, 3.0]]


@pytest.mark.gpu
def test_updates_on_the_device_equal_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """For parameters of one to many elements, in several vectors."""
    monkeypatch.setattr("pruned_rnnt.train.optim.scaled_adam._BUCKET_ELEMENTS", 3000)
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in [(), (1,), (7, 300), (5,), (64, 65), (3, 4, 2)]]
    results = []
    for device in ("cpu", "cuda"):
        model = nn.ParameterList([nn.Parameter(value.clone().to(device)) for value in values])
        optimiser = ScaledAdam(model.parameters(), lr=0.02)
        for step in range(14):
            generator = torch.Generator().manual_seed(step)
            for parameter in model:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
            optimiser.step()
        results.append([parameter.detach().cpu() for parameter in model])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_steps_are_proportional_to_the_parameter() -> None:
    changes = []
    for size in (1.0, 100.0):
        parameter = nn.Parameter(torch.linspace(-1, 1, 10) * size)
        before = parameter.detach().clone()
        optimiser = ScaledAdam([parameter], lr=0.01, max_rms=1e9)
        parameter.grad = torch.randn(10, generator=torch.Generator().manual_seed(0))
        optimiser.step()
        changes.append((parameter.detach() - before) / size)
    torch.testing.assert_close(changes[0], changes[1])
    assert changes[0].abs().max() > 1e-4


def test_no_size_grows_beyond_its_limit() -> None:
    def size_after(max_rms: float) -> float:
        parameter = nn.Parameter(torch.ones(10))
        optimiser = ScaledAdam([parameter], lr=1e-3, size_lr=10.0, max_rms=max_rms)
        for _ in range(100):
            parameter.grad = -parameter.detach().clone()
            optimiser.step()
        return float(parameter.detach().square().mean().sqrt())

    assert size_after(1e9) > 2.5
    assert 1.4 < size_after(1.5) < 1.7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parameters_of_other_types_continue_exactly(dtype: torch.dtype) -> None:
    """Sizes and their gradients are float32 then, too."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).to(dtype)
    optimiser = ScaledAdam(model.parameters(), lr=0.02)
    advance(model, optimiser, range(6))
    saved = copy.deepcopy((model.state_dict(), optimiser.state_dict()))
    expected = advance(model, optimiser, range(6, 14))
    model.load_state_dict(saved[0])
    again = ScaledAdam(model.parameters(), lr=0.02)
    again.load_state_dict(saved[1])
    assert all(map(torch.equal, advance(model, again, range(6, 14)), expected))


def test_parameters_without_elements_change_nothing() -> None:
    """Clipping begins after ten steps, by a norm of all parameters."""
    results = []
    for others in ([], [nn.Parameter(torch.zeros(0, 4))]):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimiser = ScaledAdam([*model.parameters(), *others])
        optimiser.load_state_dict(copy.deepcopy(optimiser.state_dict()))
        results.append(advance(model, optimiser, range(15)))
    assert all(map(torch.equal, *results))
