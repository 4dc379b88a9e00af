"""An update that does not apply leaves parameters and optimiser as if it had never been made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from pruned_rnnt.train.optim.conditional import FusedAdamW
from pruned_rnnt.train.optim.scaled_adam import ScaledAdam
from tests.train.run_files import flat

MAKERS: dict[str, Callable[[Iterable[nn.Parameter]], Any]] = {
    "scaled_adam": lambda parameters: ScaledAdam(parameters, lr=0.02),
    "unclipped scaled_adam": lambda parameters: ScaledAdam(parameters, lr=0.02, clip_scale=0.0),
    "adamw": lambda parameters: FusedAdamW(parameters, lr=0.02, fused=True),
}
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu])]


class Training:
    """Parameters of one and of many elements, and their optimiser."""

    def __init__(self, name: str, device: str) -> None:
        torch.manual_seed(0)
        shapes = [(), (7, 30), (1,), (5,)]
        self.values = [nn.Parameter(torch.randn(shape).to(device)) for shape in shapes]
        self.optimiser = MAKERS[name](self.values)

    def set_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        scale = 50.0 if step % 7 == 0 else 1.0  # clipped, after the first ten steps
        for value in self.values:
            value.grad = (scale * torch.randn(value.shape, generator=generator)).to(value.device)

    def step_if(self, applies: bool) -> None:
        self.optimiser.step_if(torch.tensor(applies, device=self.values[0].device))

    def fail(self, broken: float) -> None:
        """A step with gradients that are partly infinite or NaN."""
        self.set_gradients(1)
        for value in self.values[1:]:
            assert value.grad is not None
            value.grad.view(-1)[0] = broken
        self.step_if(False)
        self.optimiser.take_back()

    def state(self) -> dict[str, Any]:
        return flat({"values": self.values, "optimiser": self.optimiser.state_dict()})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", list(MAKERS))
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 3.0])
def test_update_that_does_not_apply_changes_nothing(name: str, broken: float, device: str) -> None:
    """Before each step, among them those that measure sizes and the median of the norms."""
    training, untroubled = Training(name, device), Training(name, device)
    for step in range(103):
        training.fail(broken)
        if step % 5 == 0:
            training.fail(broken)
        if step > 0:  # torch's AdamW makes its state in its first step
            assert training.state() == untroubled.state()
        for each in (training, untroubled):
            each.set_gradients(step)
            each.step_if(True)
    assert training.state() == untroubled.state()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", list(MAKERS))
def test_update_that_applies_equals_a_step(name: str, device: str) -> None:
    conditional, plain = Training(name, device), Training(name, device)
    for step in range(103):
        conditional.set_gradients(step)
        conditional.step_if(True)
        plain.set_gradients(step)
        plain.optimiser.step()
    assert conditional.state() == plain.state()


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(MAKERS))
def test_conditional_update_does_not_wait(name: str) -> None:
    training = Training(name, "cuda")
    flags = [torch.tensor(step % 3 > 0, device="cuda") for step in range(12)]
    for step, flag in enumerate(flags):
        training.set_gradients(step)
        torch.cuda.set_sync_debug_mode("error")
        try:
            training.optimiser.step_if(flag)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if step % 3 == 0:
            training.optimiser.take_back()
