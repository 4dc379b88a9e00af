"""The trainer of a model of your own: modes, frozen parts, criteria, statistics, scores."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pruned_rnnt.train import (
    BatchSize,
    OptimiserConfig,
    ScheduleConfig,
    TrainConfig,
    Trainer,
    load_checkpoint,
)
from pruned_rnnt.train.engine.log import read_metrics
from pruned_rnnt.train.engine.running_statistics import RunningStatistics

CONSTANT = ScheduleConfig(kind="constant", warm_up_steps=0)


class Net(nn.Module):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(4, 4)
        self.norm = norm or nn.Dropout(0.5)
        self.output = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.output(self.norm(self.encoder(x)))
        return found[:, 0]


def batches() -> list[Tensor]:
    return list(torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(1)))


def loss(model: Net, batch: Tensor, step: int) -> Tensor:
    x = batch.to(model.output.weight.device)
    found: Tensor = (model(x) - x.sum(1)) ** 2
    return found


def trainer(folder: Path, steps: int = 6, **options: Any) -> Trainer:
    settings = {"log_every": 1, "average_decay": 0.0, "loggers": (), **options.pop("settings", {})}
    arguments: dict[str, Any] = {
        "model": Net(),
        "batches": batches(),
        "loss": loss,
        "size": lambda batch: BatchSize(utterances=8, frames=8),
        "settings": TrainConfig(folder=str(folder), steps=steps, **settings),
        "schedule": CONSTANT,
        **options,
    }
    return Trainer(**arguments)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


@pytest.mark.parametrize("optimiser", [None, sgd])
def test_parameters_unfrozen_in_training_are_refused(
    tmp_path: Path, optimiser: Callable[[nn.Module], torch.optim.Optimizer] | None
) -> None:
    model = Net()
    model.encoder.requires_grad_(False)

    def unfreezes(model: Net, batch: Tensor, step: int) -> Tensor:
        model.encoder.requires_grad_(step >= 3)
        return loss(model, batch, step)

    own = None if optimiser is None else optimiser(model)
    run = trainer(tmp_path, model=model, loss=unfreezes, optimiser=own)
    with pytest.raises(ValueError, match=r"parameter encoder\.weight requires .* after 3 steps"):
        run.run()


@pytest.mark.parametrize("name", ["adamw", "scaled_adam"])
def test_parts_frozen_in_the_loss_are_trained_later(tmp_path: Path, name: Any) -> None:
    """As the error advises; a continued run does the same."""

    def freezes(model: Net, batch: Tensor, step: int) -> Tensor:
        model.encoder.requires_grad_(step >= 3)
        return loss(model, batch, step)

    options: dict[str, Any] = {
        "loss": freezes,
        "optimiser": OptimiserConfig(name=name),
        "settings": {"average_decay": 0.5, "save_every": 1, "keep_last": 9},
    }
    trainer(tmp_path / "straight", **options).run()
    for steps in (2, 5, 6):
        trainer(tmp_path / "parts", steps, allow_changes=True, **options).run()
    weights = [
        load_checkpoint(tmp_path / f"straight/checkpoints/step-0000000{step}.pt")["model"]
        for step in (1, 3, 4)
    ]
    assert torch.equal(weights[0]["encoder.weight"], Net().encoder.weight)
    assert torch.equal(weights[1]["encoder.weight"], Net().encoder.weight)
    assert not torch.equal(weights[2]["encoder.weight"], Net().encoder.weight)
    one, other = (
        load_checkpoint(tmp_path / folder / "checkpoints/step-00000006.pt")
        for folder in ("straight", "parts")
    )
    for state in ("model", "average"):
        assert all(torch.equal(one[state][n], other[state][n]) for n in one[state])


def test_a_criterion_outside_of_the_model_is_refused(tmp_path: Path) -> None:
    criterion = nn.Linear(1, 1)

    def with_criterion(model: Net, batch: Tensor, step: int) -> Tensor:
        found: Tensor = criterion(loss(model, batch, step)[:, None])
        return found[:, 0] ** 2

    with pytest.raises(ValueError, match=r"parameter of shape \(1.*\) that was not in model"):
        trainer(tmp_path / "outside", loss=with_criterion).run()
    criterion.requires_grad_(False)
    assert trainer(tmp_path / "frozen", loss=with_criterion).run() == "finished"
    model = Net()
    model.criterion = criterion.requires_grad_(True)
    assert trainer(tmp_path / "inside", loss=with_criterion, model=model).run() == "finished"


def test_groups_added_to_the_optimiser_are_refused(tmp_path: Path) -> None:
    model = Net()
    optimiser = sgd(model)

    def adds(model: Net, batch: Tensor, step: int) -> Tensor:
        if step == 2:
            optimiser.add_param_group({"params": [torch.zeros(1)], "lr": 0.001})
        return loss(model, batch, step)

    run = trainer(tmp_path, model=model, optimiser=optimiser, loss=adds)
    with pytest.raises(ValueError, match=r"group 1 of the optimiser, .* rate 0.001, was added"):
        run.run()


def test_parts_of_the_loss_are_added_by_name(tmp_path: Path) -> None:
    calls: list[int] = []

    def parts(model: Net, batch: Tensor, step: int) -> dict[str, Tensor]:
        found = {"total": loss(model, batch, step), "one": torch.ones(8), "ten": 10 * torch.ones(8)}
        calls.append(step)
        return found if len(calls) % 2 else dict(reversed(found.items()))

    trainer(tmp_path, 2, loss=parts, settings={"accumulate": 2}).run()
    lines = read_metrics(tmp_path)
    assert [(line["one_per_frame"], line["ten_per_frame"]) for line in lines] == [(1.0, 10.0)] * 2


@pytest.mark.parametrize("accumulate", [1, 2])
def test_other_parts_than_before_are_refused(tmp_path: Path, accumulate: int) -> None:
    calls: list[int] = []

    def parts(model: Net, batch: Tensor, step: int) -> dict[str, Tensor]:
        calls.append(step)
        total = loss(model, batch, step)
        return {"total": total, "aux": total} if len(calls) == 1 else {"total": total}

    run = trainer(tmp_path, loss=parts, settings={"accumulate": accumulate})
    with pytest.raises(ValueError, match=r"keys \['total'\], and before \['aux', 'total'\]"):
        run.run()


class ReplacingNorm(nn.Module):
    """Replaces its buffers in each pass; the positions become as many as the longest input."""

    running_mean: Tensor
    num_batches_tracked: Tensor
    positions: Tensor

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(size))
        self.register_buffer("num_batches_tracked", torch.tensor(0))
        self.register_buffer("positions", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.running_mean = 0.9 * self.running_mean + 0.1 * x.mean(0).detach()
            self.num_batches_tracked = self.num_batches_tracked + 1
            if len(self.positions) < len(x):
                self.positions = torch.arange(len(x), device=x.device)
        return x - self.running_mean


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, ReplacingNorm])
@pytest.mark.parametrize(
    ("device", "late"),
    [("cpu", False), ("cpu", True), pytest.param("cuda", True, marks=pytest.mark.gpu)],
)
def test_skipped_steps_leave_running_statistics(
    tmp_path: Path, device: str, late: bool, norm: Callable[[int], nn.Module]
) -> None:
    """A run with NaN batches has those of a run without them, also if results are read late."""
    some = batches()
    spoilt = [*some[:2], *torch.full((2, 8, 4), math.nan), *some[2:]]
    states = []
    for name, given in (("good", some), ("bad", spoilt)):
        model = Net(norm(4)).to(device)
        optimiser = OptimiserConfig(name="scaled_adam")
        run = trainer(
            tmp_path / name, len(given), model=model, batches=given, optimiser=optimiser,
            settings={"log_every": 9},  # a log line reads the result
        )  # fmt: skip
        run._trainer.stepper.reads_late = late
        assert run.run() == "finished"
        states.append(model.state_dict())
    assert states[0]["norm.num_batches_tracked"] == 4
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_the_device_decides_about_statistics() -> None:
    norm = nn.BatchNorm1d(4)
    statistics = RunningStatistics(norm)
    for applies, mean in ((False, 0.0), (True, 0.1)):
        statistics.keep()
        norm(torch.arange(2.0)[:, None].expand(2, 4) + 0.5)
        statistics.put_back(torch.tensor(applies))
        torch.testing.assert_close(norm.running_mean, torch.full((4,), mean))
        assert norm.num_batches_tracked == int(applies)


def test_only_what_a_step_changes_is_put_back(tmp_path: Path) -> None:
    """Not buffers of a frozen part, nor those of inference mode, which cannot be written."""
    model = Net(nn.BatchNorm1d(4))
    teacher = nn.Module()
    teacher.register_buffer("table", torch.zeros(1000))
    model.add_module("teacher", teacher)
    with torch.inference_mode():
        model.register_buffer("bank", torch.ones(5))
    statistics = RunningStatistics(model)
    for training, kept in ((False, 3), (True, 4)):
        teacher.train(training)
        statistics.keep()
        assert sum(len(places) for places, _ in statistics._kept) == kept
    some = batches()
    some[1] = torch.full((8, 4), math.nan)
    assert trainer(tmp_path, model=model, batches=some).run() == "finished"


def test_averages_have_the_buffers_that_a_module_replaced(tmp_path: Path) -> None:
    model = Net(ReplacingNorm())
    run = trainer(tmp_path, model=model, settings={"average_decay": 0.9})
    run.run()
    values = load_checkpoint(run.checkpoints.paths()[-1])
    for name in ("norm.running_mean", "norm.num_batches_tracked"):
        assert torch.equal(values["average"][name], model.state_dict()[name])
    assert values["average"]["norm.num_batches_tracked"] == 6


def test_broken_buffers_are_not_called_parameters(tmp_path: Path) -> None:
    model = Net()
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    with pytest.raises(ValueError, match=r"model.state_dict\(\): mask has infinite .*persistent"):
        trainer(tmp_path, model=model)
    model.register_buffer("mask", torch.zeros(1))

    def breaks(model: Net, batch: Tensor, step: int) -> Tensor:
        model.get_buffer("mask").fill_(math.nan)
        return loss(model, batch, step)

    with pytest.raises(RuntimeError, match=r"it has diverged: buffer mask has NaN values"):
        trainer(tmp_path, model=model, loss=breaks).run()


@pytest.mark.parametrize("whole", [True, False])
def test_modules_keep_their_modes(tmp_path: Path, whole: bool) -> None:
    """Over epochs and validations, which see evaluation mode; not of a model in that mode."""
    model = Net()
    (model if whole else model.norm).eval()
    seen: list[tuple[bool, bool]] = []

    def watches(model: Net, batch: Tensor, step: int) -> Tensor:
        seen.append((model.training, model.norm.training))
        return loss(model, batch, step)

    def validate(model: Net) -> float:
        assert not any(module.training for module in model.modules())
        return 1.0

    settings = {"validate_every": 3}
    trainer(tmp_path, model=model, loss=watches, validate=validate, settings=settings).run()
    assert seen == [(True, whole)] * 6


def test_scores_that_are_not_numbers_end_training_and_are_null(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scores = iter([0.5, math.nan, -math.inf])
    run = trainer(
        tmp_path, 20, validate=lambda model: next(scores),
        settings={"validate_every": 2, "early_stopping_patience": 2, "log_every": 99},
    )  # fmt: skip
    run.run()
    assert run.step == 6
    assert "step 4 validation: the score is nan, which counts as no improvement" in caplog.text
    assert str(run.checkpoints.best()).endswith("step-00000002.pt")
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["score"] for line in written] == [0.5, None, None]
    assert all(math.isnan(line["score"]) for line in read_metrics(tmp_path)[1:])


class Averaging(nn.Module):
    """Has a running mean of its inputs, and counts them."""

    ema: Tensor
    seen: Tensor

    def __init__(self, of_each: float = 1.0) -> None:
        super().__init__()
        self.of_each = of_each
        self.register_buffer("ema", torch.zeros(4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.ema.lerp_(x.mean(0).detach(), 0.1)
        self.seen += self.of_each * len(x)
        return x


def test_skipped_steps_leave_other_averages(tmp_path: Path) -> None:
    some = batches()
    spoilt = [*some[:2], torch.full((8, 4), math.nan), *some[2:]]
    states = []
    for name, given in (("good", some), ("bad", spoilt)):
        model = Net(Averaging())
        run = trainer(tmp_path / name, len(given), model=model, batches=given)
        assert run.run() == "finished"
        states.append(model.state_dict())
    assert states[1]["norm.seen"] == 32
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_buffers_may_count_beyond_a_million(tmp_path: Path) -> None:
    model = Net(Averaging(of_each=1e5))
    assert trainer(tmp_path, model=model).run() == "finished"
    assert model.state_dict()["norm.seen"] == 4.8e6
    assert trainer(tmp_path, 7, model=model, allow_changes=True).run() == "finished"
    with torch.no_grad():
        model.encoder.weight[0, 0] = 2e6
    with pytest.raises(ValueError, match=r"encoder.weight has values up to 2.0e\+06"):
        trainer(tmp_path / "other", model=model)
