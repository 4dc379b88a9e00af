"""Optimisers update as torch's do, without torch's tracer."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from pruned_rnnt.train.optim.optimiser import OptimiserConfig, build_optimiser

_UPDATE_WITH_EACH = """
import sys
import torch
from pruned_rnnt.train.optim.optimiser import OptimiserConfig, build_optimiser

for name in ("adamw", "scaled_adam"):
    model = torch.nn.Linear(3, 2)
    optimiser = build_optimiser(model, OptimiserConfig(name=name))
    model(torch.randn(4, 3)).sum().backward()
    optimiser.step()
    optimiser.zero_grad()
    optimiser.load_state_dict(optimiser.state_dict())
assert "torch._dynamo" not in sys.modules
"""


@pytest.mark.slow
def test_updates_do_not_import_dynamo() -> None:
    subprocess.run([sys.executable, "-c", _UPDATE_WITH_EACH], check=True)


def test_adamw_updates_as_torch_does_with_hooks() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    config = OptimiserConfig(name="adamw", weight_decay=0.1, clip_norm=0.0)
    optimiser = build_optimiser(model, config)
    expected_model = nn.Linear(3, 2)
    expected_model.load_state_dict(model.state_dict())
    expected = torch.optim.AdamW(
        [
            {"params": [expected_model.weight], "weight_decay": 0.1},
            {"params": [expected_model.bias], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=True,  # as ours on a CPU; the other updates round differently on some processors
    )
    calls = []
    optimiser.register_step_pre_hook(lambda *_: calls.append("before"))
    for _ in range(3):
        inputs = torch.randn(4, 3)
        for each, update in ((model, optimiser), (expected_model, expected)):
            each.zero_grad()
            each(inputs).square().sum().backward()
            update.step()
    assert calls == ["before"] * 3
    for parameter, other in zip(model.parameters(), expected_model.parameters(), strict=True):
        assert torch.equal(parameter, other)
        assert parameter.requires_grad
