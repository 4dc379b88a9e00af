"""The update of ScaledAdam against its formulas, and against trajectories of icefall's own.

The trajectories are in `scaled_adam_reference.npz`, in the folder that the environment variable
PRUNED_RNNT_TEST_DATA names.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pruned_rnnt.train.optim.scaled_adam import ScaledAdam
from pruned_rnnt.train.optim.schedule import ScheduleConfig, learning_rate_scale

TRAJECTORIES = "scaled_adam_reference.npz"
LR, BETA1, BETA2, EPS = 0.02, 0.9, 0.98, 1e-8


@pytest.fixture(scope="module")
def trajectories() -> dict[str, np.ndarray]:
    folder = os.environ.get("PRUNED_RNNT_TEST_DATA")
    if folder is None:
        pytest.skip(f"PRUNED_RNNT_TEST_DATA does not name the folder of {TRAJECTORIES}")
    path = Path(folder) / TRAJECTORIES
    if not path.is_file():
        pytest.skip(f"{path} does not exist (PRUNED_RNNT_TEST_DATA)")
    with np.load(path) as arrays:
        return dict(arrays)


@pytest.mark.parametrize("kind", ["plain", "clipped", "clipped_eden"])
def test_trajectories_equal_those_of_icefall(
    trajectories: dict[str, np.ndarray], kind: str
) -> None:
    names = [key.partition("/")[2] for key in trajectories if key.startswith("start/")]
    parameters = {n: nn.Parameter(torch.tensor(trajectories[f"start/{n}"])) for n in names}
    optimiser = ScaledAdam(parameters.values(), clip_scale=0.0 if kind == "plain" else 2.0)
    listed = trajectories["steps"].tolist()
    for step in range(listed[-1]):
        for name, parameter in parameters.items():
            parameter.grad = torch.tensor(trajectories[f"gradient/{name}"][step])
        optimiser.param_groups[0]["lr"] = float(trajectories[f"{kind}/rate"][step])
        optimiser.step()
        if step + 1 not in listed:
            continue
        for name, parameter in parameters.items():
            theirs = torch.tensor(trajectories[f"{kind}/{name}"][listed.index(step + 1)])
            difference = (parameter.detach() - theirs).norm() / theirs.norm()
            assert difference < 1e-5, (name, step + 1)


def test_eden_equals_that_of_icefall(trajectories: dict[str, np.ndarray]) -> None:
    config = ScheduleConfig(kind="eden", warm_up_steps=500)
    theirs = trajectories["clipped_eden/rate"].tolist()
    ours = [0.045 * learning_rate_scale(config, step, 0, 1000) for step in range(len(theirs))]
    assert ours == pytest.approx(theirs)


@dataclass
class PlainScaledAdam:
    """The formulas of the module's docstring for one parameter after the other, in float64."""

    values: list[Tensor]
    clip_scale: float
    step: int = 0
    states: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    limit: float = float("inf")
    factors: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        for value in self.values:
            zero = torch.zeros_like(value)
            start = {"change": zero, "v": zero, "v_size": zero.sum()}
            self.states.append({**start, "r": self._size(value), "slopes": torch.zeros(0)})

    def _size(self, value: Tensor) -> Tensor:
        return torch.tensor(0.1) if value.numel() == 1 else value.square().mean().sqrt()

    def update(self, gradients: list[Tensor]) -> None:
        factor = self._factor(gradients) if self.clip_scale > 0 else 1.0
        for value, state, gradient in zip(self.values, self.states, gradients, strict=True):
            self._update(value, state, factor * gradient)
        self.step += 1

    def _factor(self, gradients: list[Tensor]) -> float:
        if self.step == 0:
            return 1.0
        squares = [
            float((gradient * state["r"]).square().sum())
            for gradient, state in zip(gradients, self.states, strict=True)
        ]
        self.norms.append(sum(squares) ** 0.5)
        count = {10: 10, 20: 20, 40: 40}.get(self.step, 100 if self.step % 100 == 0 else 0)
        if count in (20, 40, 100):
            self.limit = self.clip_scale * statistics.median_high(self.norms[-count:])
        elif count == 10:
            self.limit = self.clip_scale * statistics.median_low(self.norms)
        if count in (10, 20, 40):
            self.limit *= 2
        self.factors.append(min(1.0, self.limit / self.norms[-1]))
        return self.factors[-1]

    def _update(self, value: Tensor, state: dict[str, Tensor], gradient: Tensor) -> None:
        slope = (gradient * value).sum()[None]
        state["slopes"] = torch.cat([state["slopes"], slope])
        state["v"] = BETA2 * state["v"] + (1 - BETA2) * gradient**2
        correction = 1 - BETA2 ** (self.step + 1)
        spread = (state["v"] / (correction if correction < 0.99 else 1.0)).sqrt()
        growth = 0.0
        if self.step % 4 == 3:
            state["r"] = self._size(value)
            growth = self._growth(state)
            state["slopes"] = torch.zeros(0)
        along = -LR * max(float(state["r"]), 1e-5) * gradient / (spread + EPS)
        if value.numel() == 1:
            growth = 0.0
        state["change"] = BETA1 * state["change"] + (1 - BETA1) * (along + growth * value)
        value += state["change"]
        if value.numel() == 1:
            value.clamp_(-10, 10)

    def _growth(self, state: dict[str, Tensor]) -> float:
        decay = BETA2**4
        state["v_size"] = decay * state["v_size"] + (1 - decay) * state["slopes"].square().mean()
        correction = (1 - decay ** ((self.step + 1) // 4)) ** 0.5
        step = float(state["slopes"].sum() / (state["v_size"].sqrt() + EPS))
        growth = min(max(-0.1 * LR * correction * step, -0.1), 0.1)
        size = float(state["r"])
        return 0.0 if size < 1e-5 else min(growth, (3.0 - size) / size)


@pytest.mark.parametrize("clip_scale", [0.0, 1.2])
def test_updates_equal_the_formulas_for_every_shape(
    clip_scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pruned_rnnt.train.optim.scaled_adam._BUCKET_ELEMENTS", 20)
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (1,), (), (5,), (2, 3, 2), (17,), (4, 1), (6,)]
    sizes = [1.0, 1e-3, 2.0, 1e-7, 30.0, 1.0, 0.5, 0.0]
    parameters = [
        nn.Parameter(size * torch.randn(shape, generator=generator))
        for shape, size in zip(shapes, sizes, strict=True)
    ]
    with torch.no_grad():
        parameters[1].fill_(9.999)  # reaches its limit
    plain = PlainScaledAdam([p.detach().double() for p in parameters], clip_scale)
    optimiser = ScaledAdam(parameters, lr=LR, clip_scale=clip_scale)
    for step in range(240):
        # Some norms are far above the median, and later ones are smaller than earlier ones.
        size = (20.0 if step % 13 == 12 else 1.0) / (1 + step / 50)
        gradients = [size * torch.randn(shape, generator=generator) for shape in shapes]
        gradients[1].abs_().neg_()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if step % 5 == 1:  # as a gradient of zero
            parameters[5].grad = None
            gradients[5] = torch.zeros(17)
        plain.update([gradient.double() for gradient in gradients])
        optimiser.step()
    for parameter, value in zip(parameters, plain.values, strict=True):
        assert (parameter.detach() - value).norm() < 1e-5 * value.norm()
    assert parameters[1].item() == 10.0
    if clip_scale > 0:
        assert min(plain.factors) < 0.2
        assert max(plain.factors[10:]) == 1.0


def test_clipping_limits_the_steps_after_an_outlier() -> None:
    def second_moment(clip_scale: float) -> float:
        parameter = nn.Parameter(torch.ones(3))
        optimiser = ScaledAdam([parameter], lr=0.0, clip_scale=clip_scale)
        for step in range(13):
            parameter.grad = torch.full((3,), 1e4 if step == 12 else 1.0)
            optimiser.step()
        return float(optimiser.state[parameter]["square"].max())

    # The limit is twice as high up to step 40: here 4 times the norm of the other gradients.
    others = 1 - BETA2**12
    assert second_moment(2.0) == pytest.approx(BETA2 * others + (1 - BETA2) * 16)
    assert second_moment(0.0) == pytest.approx(BETA2 * others + (1 - BETA2) * 1e8)


@pytest.mark.gpu
def test_no_step_waits_for_the_device() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).to("cuda")
    optimiser = ScaledAdam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(102):
            optimiser.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
