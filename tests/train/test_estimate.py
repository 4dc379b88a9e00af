"""Estimates of a training: what they count, print and leave behind."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pruned_rnnt.cli import main
from pruned_rnnt.config.load import load_config
from pruned_rnnt.model import speech_model, training_shapes
from pruned_rnnt.model.encoder_graphs import Captures
from pruned_rnnt.train.engine.state import TrainingState
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.tasks.dry_run import DryRun
from pruned_rnnt.train.tasks.estimate import Counts, Estimate, Measured, count, graphs_needed
from pruned_rnnt.train.tasks.speech_task import SpeechTask
from tests.tiny_corpus import ZIPFORMER, speech_trainer, tiny_experiment, tiny_overrides

QUICK = ["--estimate", "--estimate-seconds", "0.1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ["train.steps=6", "data.max_duration=16"],
        ["train.steps=7", "data.max_duration=16", "train.validate_every=3"],
        ["train.steps=7", "data.max_duration=16", "train.validate_every=4", "train.save_every=2"],
        ["train.steps=20", "data.max_duration=16", "train.validate_every=2"],
    ],
)
def test_counts_are_those_of_the_training(
    settings: list[str], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_experiment(corpus, tmp_path / "run", "train.loggers=[]", *settings)
    trials = DryRun(config)
    counts = count(config, trials.scan(16.0, 1000), trials.loader.utterances)
    done = {"save": 0, "validate": 0}
    for kind, name in ((TrainingState, "save"), (SpeechTask, "validate")):
        original = getattr(kind, name)

        def counted(*arguments: object, original=original, name=name, **named: object) -> object:
            done[name] += 1
            return original(*arguments, **named)

        monkeypatch.setattr(kind, name, counted)
    trainer = speech_trainer(config)
    trainer.run()
    assert counts.validations == done["validate"]
    assert counts.checkpoints == done["save"]
    assert counts.steps_per_epoch == len(list(trainer.task.train_loader()))


@pytest.mark.slow
def test_estimate_leaves_no_trace(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tiny_overrides(
        corpus,
        tmp_path / "exp/run",
        "train.steps=1000",
        "train.mean_every=1",
        "model.encoder.feedforward_dim=2048",
    )
    before = {path: path.stat().st_mtime_ns for path in corpus.rglob("*")}
    assert main(["train", *QUICK, *settings]) == 0
    out = capsys.readouterr().out
    assert "1000 steps of" in out
    (kept,) = [line for line in out.splitlines() if line.startswith("each process keeps")]
    sizes = [float(part.removesuffix(" MiB").split()[-1]) for part in kept.split(",")]
    model, gradients, optimiser, averages = sizes
    assert 1 < gradients <= model
    # Two moments in float32; a running average in float32 and a mean in float64.
    assert optimiser == pytest.approx(2 * gradients, abs=0.2)
    assert averages == pytest.approx(3 * gradients, abs=0.3)
    assert "memory of the process" in out
    (line,) = [line for line in out.splitlines() if line.startswith("estimate:")]
    hours, seconds = float(line.split()[1]), float(line.partition("(")[2].split()[0])
    assert hours == pytest.approx(seconds / 3600, rel=0.1, abs=1e-3)
    assert seconds > 0
    assert list(tmp_path.iterdir()) == []
    assert {path: path.stat().st_mtime_ns for path in corpus.rglob("*")} == before


def test_memory_of_processes_that_divide_the_optimiser(corpus: Path, tmp_path: Path) -> None:
    settings = ["train.shard=optimiser", "model.encoder.dim=64"]
    trials = DryRun(tiny_experiment(corpus, tmp_path / "run", *settings))
    alone, two, four = (trials.memory(processes) for processes in (1, 2, 4))
    assert alone.parameters == two.parameters == four.parameters
    for part in ("gradients", "optimiser", "averages"):
        whole = getattr(alone, part)
        assert whole / 2 <= getattr(two, part) < 0.55 * whole
        assert whole / 4 <= getattr(four, part) < 0.35 * whole
    assert alone.gradients == sum(4 * p.numel() for p in trials.task.model.parameters())


def test_seconds_are_those_of_all_parts() -> None:
    measured = Measured(
        seconds_per_step=0.5,
        steps=10,
        start_seconds=7.0,
        captures=Captures(20, 2.5),
        epoch_seconds=0.1,
        validation_seconds=3.0,
        checkpoint_seconds=1.0,
        peak=0,
    )
    counts = Counts(steps=100, steps_per_epoch=10.0, validations=4, checkpoints=9)
    estimate = Estimate(measured=measured, memory={}, counts=counts, scan=None, failed=())  # type: ignore[arg-type]
    assert estimate.seconds == pytest.approx(7 + 2.5 + 50 + 9 * 0.1 + 12 + 9)


def test_graphs_are_counted_in_a_limited_time(corpus: Path, tmp_path: Path) -> None:
    trials = DryRun(tiny_experiment(corpus, tmp_path / "run", "train.accumulate=2"))
    trials.scan(8.0, 1000)
    graphs: Any = SimpleNamespace(graph_of=lambda shapes, utterances, frames: (utterances, frames))
    trials.task.model.encoder_graphs = graphs
    sizes = set(islice(trials.sizes(), 14))
    assert graphs_needed(trials, 7, seconds=60.0) == len(sizes) > 1
    assert graphs_needed(trials, 7, seconds=-1.0) == 0


@pytest.mark.gpu
def test_graphs_needed_are_those_that_a_training_captures(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The schedules of the encoder then reach zero at three steps of the training.
    monkeypatch.setattr(speech_model, "_REFERENCE_SECONDS", 16.0)
    # Finer shapes then come into use.
    monkeypatch.setattr(training_shapes, "_CAPTURE_STEPS", 0.05)
    settings = tiny_overrides(corpus, tmp_path / "run", "train.device=cuda", "train.steps=15")
    kept = [each for each in settings if not each.startswith("model.encoder.")]
    encoder = ["model.encoder.kind=zipformer", *ZIPFORMER, "model.encoder.warm_up_steps=1"]
    config = load_config(ExperimentConfig, None, [*kept, *encoder, "train.accumulate=2"])
    trials = DryRun(config)
    largest = trials.scan(config.data.max_duration, 1000).largest
    trials.try_batch(largest["padded frames"])  # a capture knows the schedules that it depends on
    needed = graphs_needed(trials, 15, seconds=60.0)
    trainer = speech_trainer(config)
    trainer.run()
    assert needed == trainer.model.encoder_graphs.captures.number > 2
