"""Settings that --allow-changes changes take effect, those of optimiser and scaler included; and
data that have changed in the middle of an epoch."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from pruned_rnnt.config.load import ConfigError
from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.model.speech_model import ModelLosses
from pruned_rnnt.system import switched_kernels
from pruned_rnnt.train.engine import train_config
from pruned_rnnt.train.engine.checkpoint import (
    CheckpointFolder,
    load_checkpoint,
    save_checkpoint,
)
from pruned_rnnt.train.engine.train_config import TrainConfig, pick_device
from pruned_rnnt.train.engine.trainer import Trainer
from pruned_rnnt.train.optim.optimiser import (
    OptimiserConfig,
    build_optimiser,
    load_optimiser_state,
)
from pruned_rnnt.train.tasks.speech_task import SpeechTask
from tests.tiny_corpus import make_corpus, speech_trainer, tiny_experiment

FIRST = OptimiserConfig(weight_decay=0.01, clip_scale=2.0)
SECOND = OptimiserConfig(
    learning_rate=1e-4, betas=(0.5, 0.7), eps=1e-3, weight_decay=0.3, clip_scale=1.0
)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1))


def trained(config: OptimiserConfig, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small_model()
    optimiser = build_optimiser(model, config)
    for step in range(steps):
        update(model, optimiser, step)
    return model, optimiser


def update(model: nn.Module, optimiser: torch.optim.Optimizer, step: int) -> None:
    optimiser.zero_grad()
    inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(step))
    model(inputs).square().sum().backward()
    optimiser.step()


@pytest.mark.parametrize("name", ["adamw", "scaled_adam"])
def test_new_settings_change_the_next_update(name: str) -> None:
    """As if the settings of the first optimiser were changed in place."""
    first, second = (
        OptimiserConfig(**{**vars(config), "name": name}) for config in (FIRST, SECOND)
    )
    model, optimiser = trained(first, 12)
    other = small_model()
    other.load_state_dict(model.state_dict())
    continued = build_optimiser(other, second)
    load_optimiser_state(continued, copy.deepcopy(optimiser.state_dict()))
    fresh = build_optimiser(small_model(), second)
    of_kind = {"adamw": ["weight_decay"], "scaled_adam": ["clip_scale"]}[name]
    for key in ("betas", "eps", *of_kind):
        found = [group[key] for group in continued.param_groups]
        assert getattr(second, key) in found, key
        assert found == [group[key] for group in fresh.param_groups], key
    for group, new in zip(optimiser.param_groups, fresh.param_groups, strict=True):
        group.update(
            {key: new[key] for key in ("lr", "betas", "eps", "weight_decay") if key in new}
        )
        if name == "scaled_adam":
            group["clip_scale"] = 1.0
            group["clip_limit"] = group["clip_limit"] / 2
    for group in continued.param_groups:
        group["lr"] = second.learning_rate  # as the trainer does before each step
    for step in range(12, 15):
        update(model, optimiser, step)
        update(other, continued, step)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_clipping_that_is_switched_on_later() -> None:
    """The norms that are unknown then do not count as zeros."""
    off = OptimiserConfig(name="scaled_adam", clip_scale=0.0)
    _, optimiser = trained(off, 60)
    model = small_model()
    continued = build_optimiser(model, OptimiserConfig(name="scaled_adam", clip_scale=2.0))
    load_optimiser_state(continued, copy.deepcopy(optimiser.state_dict()))
    for step in range(60, 210):
        before = [parameter.clone() for parameter in model.parameters()]
        update(model, continued, step)
        moved = zip(before, model.parameters(), strict=True)
        assert any(not torch.equal(one, two) for one, two in moved)
    assert 0 < float(continued.param_groups[0]["clip_limit"]) < torch.inf


def test_precision_and_average_of_a_continued_run(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ["train.steps=2", "train.validate_every=100"]
    plain = speech_trainer(tiny_experiment(corpus, run, *settings, "train.average_decay=0"))
    plain.run()
    changes = ["train.precision=float16", "train.steps=3", "train.validate_every=100"]
    config = tiny_experiment(corpus, run, *changes, "optimiser.weight_decay=0.5")
    trainer = speech_trainer(config, allow_changes=True)
    assert trainer.stepper.scaler.is_enabled()
    assert trainer.optimiser.param_groups[0]["weight_decay"] == 0.5
    assert trainer.average is not None
    saved = plain.model.state_dict()
    average = trainer.average.state_dict()
    assert all(torch.equal(saved[name], average[name]) for name in saved)
    trainer.run()
    assert trainer.state.counters.step == 3
    again = speech_trainer(
        tiny_experiment(corpus, run, *changes[1:], "train.steps=4"), allow_changes=True
    )
    assert not again.stepper.scaler.is_enabled()


@pytest.mark.slow
def test_scores_of_another_metric_are_not_compared(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def trainer(metric: str) -> Trainer:
        return speech_trainer(tiny_experiment(corpus, tmp_path / "run", f"decode.metric={metric}"))

    trainer("cer").run()
    same, other = trainer("cer"), trainer("wer")
    assert same.state.counters.best_score < float("inf") == other.state.counters.best_score
    assert other.state.counters.validations_since_best == 0
    assert "decode.metric: cer -> wer: earlier scores cannot be compared" in caplog.text
    best = other.checkpoints.best()
    assert best is not None
    other.state.counters.step += 1
    other.state.save(other.checkpoints, score=None)
    # Ended before a validation, and continued.
    other = trainer("wer")
    for _ in range(2 + other.config.train.keep_last):
        other.state.counters.step += 1
        other.state.save(other.checkpoints, score=None)
    assert other.checkpoints.best() == best
    # Worse as a number, but that of another metric.
    other.state.counters.step += 1
    assert other.state.save(other.checkpoints, score=1e9) == other.checkpoints.best()
    assert not best.exists()
    other.state.counters.step += 1
    other.state.save(other.checkpoints, score=2e9)
    assert other.checkpoints.best() == other.checkpoints.paths()[-2]


class Scaled(SpeechTask):
    """A task of one's own, with another loss."""

    def losses(self, batch: Batch, step: int) -> ModelLosses:
        found = super().losses(batch, step)
        return dataclasses.replace(found, objective=3 * found.objective, total=3 * found.total)


@pytest.mark.slow
def test_another_task_does_not_continue_a_run(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_experiment(corpus, tmp_path / "run", "train.steps=1")
    assert Trainer(config, make_task=Scaled).run() == "finished"
    with pytest.raises(ConfigError, match=r"run of the task \S*test_changed_settings\.Scaled"):
        speech_trainer(config)
    assert "task changed" not in caplog.text
    assert speech_trainer(config, allow_changes=True).state.counters.step == 1
    assert "task changed" in caplog.text
    # The file may be a program in the next run, and checkpoints of version 0.2 do not know.
    assert Trainer(config, make_task=Scaled).state.counters.step == 1
    path = CheckpointFolder(tmp_path / "run/checkpoints").path(1)
    for changes in ({"task_class": "other.SpeechTask"}, {"task_class": ""}):
        save_checkpoint(path, {**load_checkpoint(path), **changes})
        assert speech_trainer(config).state.counters.step == 1


def short_run(
    data: Path, run: Path, steps: int = 2, *settings: str, allow: bool = False
) -> Trainer:
    """A training that ends in the middle of an epoch."""
    plan = (f"train.steps={steps}", "train.validate_every=100", "data.max_duration=3", *settings)
    return speech_trainer(tiny_experiment(data, run, *plan), allow_changes=allow)


@pytest.mark.parametrize("joining", ["0", "0.9"])
@pytest.mark.slow
def test_other_data_do_not_continue_an_epoch(
    corpus: Path, tmp_path: Path, joining: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    joined = f"data.joining.probability={joining}"
    short_run(corpus, run, 2, joined).run()
    moved = shutil.copytree(corpus, tmp_path / "moved")
    assert short_run(moved, run, 2, joined, "data.num_workers=2").state.counters.batch == 2
    # The same ids, with other texts and durations.
    other = make_corpus(tmp_path / "other", seed=1, tokens_from=corpus)
    with pytest.raises(
        ConfigError, match=r"after batch 2 of epoch 0: .* other utterances"
    ) as error:
        short_run(other, run, 2, joined)
    assert f"(data.path: {corpus} -> {other}), or pass --allow-changes" in str(error.value)
    # Data that were prepared again in the same folder.
    shutil.rmtree(moved)
    other.rename(moved)
    with pytest.raises(ConfigError, match="use the data that the run began with"):
        short_run(moved, run, 2, joined)
    trainer = short_run(moved, run, 3, joined, allow=True)
    assert "continuing after as many batches of the new data" in caplog.text
    assert trainer.run() == "finished"
    assert trainer.state.counters.batch == 3


@pytest.mark.slow
def test_fewer_data_end_the_epoch_if_changes_are_allowed(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    short_run(corpus, run, 4).run()
    few = make_corpus(tmp_path / "few", train=3, tokens_from=corpus)
    with pytest.raises(ConfigError, match="the data now give only"):
        short_run(few, run, 4)
    trainer = short_run(few, run, 5, allow=True)
    assert trainer.run() == "finished"
    assert (trainer.state.counters.epoch, trainer.state.counters.batch) == (1, 1)


def test_checkpoints_of_earlier_versions_know_no_batches(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    short_run(corpus, run).run()
    path = run / "checkpoints/step-00000002.pt"
    values = load_checkpoint(path)
    del values["samplers"], values["sampler"]["digest"]
    save_checkpoint(path, values)
    assert (
        short_run(
            make_corpus(tmp_path / "other", seed=1, tokens_from=corpus), run
        ).state.counters.batch
        == 2
    )


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA")
def test_a_torch_without_cuda_beside_a_driver_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train_config._warn_of_torch_without_cuda.cache_clear()
    pick_device(TrainConfig())
    assert caplog.messages == []
    monkeypatch.setattr(switched_kernels, "driver", lambda: "580.1")
    pick_device(TrainConfig(device="cpu"))
    assert caplog.messages == []
    pick_device(TrainConfig())
    pick_device(TrainConfig())
    (message,) = caplog.messages
    assert "install a torch with CUDA, or pass train.device=cpu" in message


@pytest.mark.parametrize(("before", "after"), [("auto", "cpu"), ("cpu", "auto")])
def test_device_that_auto_stands_for(
    corpus: Path, tmp_path: Path, before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    short_run(corpus, tmp_path / "run", 2, f"train.device={before}").run()
    continued = short_run(corpus, tmp_path / "run", 2, f"train.device={after}")
    assert continued.state.counters.step == 2
