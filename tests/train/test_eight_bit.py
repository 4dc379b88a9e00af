"""AdamW with moments of eight bits: steps near those of AdamW, exact continuation, refusals."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pruned_rnnt.config.load import ConfigError
from pruned_rnnt.system.optional_packages import MissingPackageError
from pruned_rnnt.train.engine.checkpoint import load_checkpoint
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.optim.optimiser import (
    OptimiserConfig,
    build_optimiser,
    load_optimiser_state,
)
from tests.tiny_corpus import speech_trainer, tiny_experiment
from tests.train.processes import run_ranks
from tests.train.run_files import checkpoint_of, killed_at, losses_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'pruned_rnnt\[bitsandbytes\]'"):
        build_optimiser(nn.Linear(2, 2), OptimiserConfig(name="adamw_8bit"))


@pytest.fixture
def package() -> None:
    pytest.importorskip("bitsandbytes")


def trained(optimiser: torch.optim.Optimizer, model: nn.Module, steps: range) -> list[float]:
    """Losses of a regression on the linear function of a fixed matrix."""
    device = next(model.parameters()).device
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(32, 64, generator=generator).to(device)
        target = inputs.roll(1, dims=1)
        optimiser.zero_grad()
        loss = (model(inputs) - target).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses


def new(name: str, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    # 4096 elements, from which on moments have eight bits, and fewer.
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 63), nn.Linear(63, 64)).to(device)
    config = OptimiserConfig(name=name, learning_rate=3e-3, weight_decay=0.1)  # type: ignore[arg-type]
    return model, build_optimiser(model, config)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("device", DEVICES)
def test_steps_are_near_those_of_adamw(device: str) -> None:
    model, optimiser = new("adamw_8bit", device)
    other, adamw = new("adamw", device)
    start = [p.detach().clone() for p in model.parameters()]
    losses, expected = (trained(o, m, range(60)) for o, m in ((optimiser, model), (adamw, other)))
    assert losses[-1] < 0.5 * losses[0]
    assert losses == pytest.approx(expected, rel=0.005)
    for value, near, before in zip(model.parameters(), other.parameters(), start, strict=True):
        assert (value - near).norm() < 0.05 * (near - before).norm()
    # Fewer elements have moments in float32.
    kept = {p: optimiser.state[p] for p in model.parameters()}
    assert [s["state1"].dtype == torch.uint8 for s in kept.values()] == [
        p.numel() >= 4096 for p in kept
    ]


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("device", DEVICES)
def test_small_parameters_have_the_steps_of_adamw(device: str) -> None:
    def of(name: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(64, 63).to(device)
        optimiser = build_optimiser(model, OptimiserConfig(name=name))  # type: ignore[arg-type]
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(device)
            optimiser.step()
        return [p.detach() for p in model.parameters()]

    for value, expected in zip(of("adamw_8bit"), of("adamw"), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("device", DEVICES)
def test_loaded_state_continues_exactly(device: str) -> None:
    model, optimiser = new("adamw_8bit", device)
    trained(optimiser, model, range(20))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict()}, file)
    expected = trained(optimiser, model, range(20, 25))
    file.seek(0)
    saved = torch.load(file, weights_only=True, map_location="cpu")
    other, continued = new("adamw_8bit", device)
    other.load_state_dict(saved["model"])
    load_optimiser_state(continued, saved["optimiser"])
    assert trained(continued, other, range(20, 25)) == expected
    qmaps = {s["qmap1"].data_ptr() for s in continued.state.values() if "qmap1" in s}
    assert len(qmaps) == 1


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_states_of_the_other_optimiser_are_refused(name: str) -> None:
    others = {"adamw": "adamw_8bit", "adamw_8bit": "adamw"}
    _, optimiser = new(name, "cpu")
    _, other = new(others[name], "cpu")
    with pytest.raises(ValueError, match="the saved optimiser state has"):
        load_optimiser_state(optimiser, other.state_dict())


SETTINGS = (
    "optimiser.name=adamw_8bit",
    "model.encoder.dim=64",
    "model.encoder.feedforward_dim=64",
    "data.max_duration=3",
    "train.threads=1",
    "train.save_every=2",
    "train.keep_last=9",
)


def train(ranks: Ranks, config: ExperimentConfig) -> str:
    return speech_trainer(config, ranks).run()


def train_killed(ranks: Ranks, config: ExperimentConfig) -> None:
    with killed_at(3):
        speech_trainer(config, ranks).run()


@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_a_killed_run_continues_exactly(corpus: Path, tmp_path: Path) -> None:
    straight, killed = (tiny_experiment(corpus, tmp_path / n, *SETTINGS) for n in ("a", "b"))
    train(Ranks(), straight)
    train_killed(Ranks(), killed)
    train(Ranks(), killed)
    found = checkpoint_of(tmp_path / "b", 4)
    expected = checkpoint_of(tmp_path / "a", 4)
    assert any("absmax1" in key for key in expected)
    assert repr(found) == repr(expected)
    adamw = tiny_experiment(corpus, tmp_path / "b", *SETTINGS, "optimiser.name=adamw")
    with pytest.raises(ConfigError, match="another optimiser than this AdamW"):
        speech_trainer(adamw, allow_changes=True)


@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_two_processes_divide_it(corpus: Path, tmp_path: Path) -> None:
    """With the same results as without, and continued by one process."""
    whole = tiny_experiment(corpus, tmp_path / "whole", *SETTINGS)
    divided = tiny_experiment(corpus, tmp_path / "divided", *SETTINGS, "train.shard=optimiser")
    for config in (whole, divided):
        assert run_ranks(2, train, config) == ["finished", "finished"]
    assert losses_of(divided.folder) == losses_of(whole.folder)
    states: list[dict[str, Any]] = [
        load_checkpoint(config.folder / "checkpoints/step-00000004.pt")["optimiser"]["state"]
        for config in (whole, divided)
    ]
    assert states[0].keys() == states[1].keys()
    for index, state in states[0].items():
        assert state.keys() == states[1][index].keys()
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[1][index][name]))
    more = tiny_experiment(corpus, divided.folder, *SETTINGS, "train.steps=5")
    assert speech_trainer(more, allow_changes=True).run() == "finished"
