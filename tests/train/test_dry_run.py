"""Dry runs: trial steps on the largest batches, and the search for the largest bound that fits."""

from __future__ import annotations

import dataclasses
import math
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_FAILED, EXIT_USAGE
from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.data.input.data_config import AugmentationConfig
from pruned_rnnt.model.kernels import available
from pruned_rnnt.model.speech_model import ModelLosses
from pruned_rnnt.model.training_shapes import TrainingShapes
from pruned_rnnt.system.usage_errors import UsageError
from pruned_rnnt.train.engine.memory import OUT_OF_MEMORY
from pruned_rnnt.train.tasks import dry_run
from pruned_rnnt.train.tasks.dry_run import MEASURES, DryRun, search_largest
from pruned_rnnt.train.tasks.speech_task import SpeechTask
from tests.tiny_corpus import speech_trainer, tiny_experiment, tiny_overrides
from tests.train.failures import run_out_of_memory


def test_largest_batches_are_those_of_training(corpus: Path, tmp_path: Path) -> None:
    config = tiny_experiment(corpus, tmp_path / "run", "data.max_duration=3")
    scan = DryRun(config).scan(3.0, limit=1000)
    batches = list(speech_trainer(config).task.train_loader())
    assert scan.complete
    assert scan.batches == len(batches)
    assert scan.seconds == pytest.approx(sum(sum(b.durations) for b in batches))
    largest = scan.largest
    assert set(largest) == set(MEASURES)
    frames = [b.features_NTF.size(0) * b.features_NTF.size(1) for b in batches]
    assert largest["padded frames"].frames == max(frames)
    assert largest["longest utterance"].longest == max(max(b.durations) for b in batches)
    assert largest["symbols"].symbols == max(int(b.target_lengths_N.sum()) for b in batches)
    nodes = [
        len(b) * -(-b.features_NTF.size(1) // 4) * (int(b.target_lengths_N.max()) + 1)
        for b in batches
    ]
    assert largest["lattice nodes"].lattice == max(nodes)
    # As data.max_lattice counts: of utterances that are twice as long.
    augmentation = AugmentationConfig(tempo=0.5)
    stretched = dataclasses.replace(config.data, augmentation=augmentation)
    trials = DryRun(dataclasses.replace(config, data=stretched))
    found = trials.scan(3.0, limit=1000).largest["lattice nodes"].lattice
    assert 1.8 * max(nodes) < found < 2.2 * max(nodes)
    partial = DryRun(config).scan(3.0, limit=2)
    assert not partial.complete
    assert partial.batches == 2


@pytest.mark.slow
def test_joined_batches_are_tried_as_the_largest_of_several_epochs(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joining = ["data.joining.probability=0.5", "data.joining.silence_probability=0.5"]
    config = tiny_experiment(corpus, tmp_path / "run", "data.max_duration=6", *joining)
    trials = DryRun(config)
    tried: list[tuple[int, int]] = []
    losses = SpeechTask.losses

    def frames_and_nodes(batch: Batch) -> tuple[int, int]:
        frames = batch.features_NTF.size(0) * batch.features_NTF.size(1)
        return frames, frames * (batch.targets_NU.size(1) + 1)

    def recorded(self: SpeechTask, batch: Batch, step: int) -> ModelLosses:
        tried.append(frames_and_nodes(batch))
        return losses(self, batch, step)

    monkeypatch.setattr(SpeechTask, "losses", recorded)
    sampled = trials.scan(6.0, limit=1000).largest["padded frames"]
    assert trials.try_batch(sampled).fits
    drawn = [frames_and_nodes(trials.loader.dataset[(n, sampled.cuts)]) for n in range(8)]
    for measure in (0, 1):
        assert max(each[measure] for each in tried) == max(each[measure] for each in drawn)
    assert max(drawn) > drawn[0]


def test_a_skipped_step_does_not_end_a_trial(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = DryRun(tiny_experiment(corpus, tmp_path / "run", "data.max_duration=6"))
    sampled = trials.scan(6.0, limit=1).largest["padded frames"]
    problems = ["scale halved", "scale halved", "", f"{OUT_OF_MEMORY}: 1 GiB"]

    def step(batches: list[Batch], step: int) -> SimpleNamespace:
        report = SimpleNamespace(problem=problems.pop(0))
        return SimpleNamespace(report=lambda: report)

    monkeypatch.setattr(trials, "_drawn", lambda sampled: ["longest", "largest"])
    monkeypatch.setattr(trials, "stepper", step)
    trial = trials.try_batch(sampled)
    assert not trial.fits
    assert trial.problem == f"{OUT_OF_MEMORY}: 1 GiB"


def test_a_trial_is_not_padded_to_the_shape_of_a_larger_one(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = DryRun(tiny_experiment(corpus, tmp_path / "run", "data.max_duration=6"))
    sampled = trials.scan(6.0, limit=1).largest["padded frames"]
    shapes = TrainingShapes(6)
    padded: list[tuple[int, int]] = []

    def step(batches: list[Any], step: int) -> SimpleNamespace:
        padded.append(shapes.shape_of(*batches[0]))
        return SimpleNamespace(report=lambda: SimpleNamespace(problem=""))

    graphs: Any = SimpleNamespace(shapes=shapes)
    trials.task.model.encoder_graphs = graphs
    monkeypatch.setattr(trials, "_drawn", lambda sampled: [(64, 1600), (48, 1600)])
    monkeypatch.setattr(trials, "stepper", step)
    trials.try_batch(sampled)
    assert padded[-1] == TrainingShapes(6).shape_of(48, 1600) != padded[0]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")
@pytest.mark.slow
def test_a_trial_does_not_count_what_earlier_ones_have_freed(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = DryRun(tiny_experiment(corpus, tmp_path / "run", "data.max_duration=6"))
    sampled = trials.scan(6.0, limit=1).largest["padded frames"]
    blocks = [30_000, 30_000, 0, 0]  # of 8 KB in each pass
    kept: list[torch.Tensor] = []

    def step(batches: list[Batch], step: int) -> SimpleNamespace:
        made = [torch.ones(2000) for _ in range(blocks.pop(0))]
        # glibc returns by itself only what is above the last block in use.
        kept.extend(made[-1:])
        return SimpleNamespace(report=lambda: SimpleNamespace(problem=""))

    monkeypatch.setattr(trials, "stepper", step)
    large, small = trials.try_batch(sampled), trials.try_batch(sampled)
    assert small.peak < large.peak - 150e6


@pytest.mark.slow
def test_dry_run_prints_a_table_and_writes_nothing(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tiny_overrides(corpus, tmp_path / "run", "data.max_duration=3")
    before = {path: path.stat().st_mtime_ns for path in corpus.rglob("*")}
    assert main(["train", "--dry-run", *settings]) == 0
    out = capsys.readouterr().out
    assert "all of the first epoch" in " ".join(out.split())
    for heading in ("padded frames", "symbols", "longest utterance", "lattice nodes", "GiB"):
        assert heading in out
    assert "…" not in out
    assert not (tmp_path / "run").exists()
    assert {path: path.stat().st_mtime_ns for path in corpus.rglob("*")} == before


TRIALS = pytest.mark.parametrize(
    "options", [["--dry-run"], ["--estimate", "--estimate-seconds", "0.1"]], ids=["run", "estimate"]
)


@TRIALS
def test_trials_refuse_torchrun(
    options: list[str],
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", *options, *tiny_overrides(corpus, tmp_path / "run")]) == EXIT_FAILED
    assert "without torchrun" in capsys.readouterr().err


@pytest.mark.slow
@TRIALS
def test_batches_that_do_not_fit_are_named(
    options: list[str],
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses = SpeechTask.losses
    refused: list[str] = []

    def failing(self: SpeechTask, batch: Batch, step: int) -> ModelLosses:
        if batch.target_lengths_N.sum() > 8:
            refused.append(batch.ids[0])
            run_out_of_memory("cpu")
        return losses(self, batch, step)

    monkeypatch.setattr(SpeechTask, "losses", failing)
    settings = tiny_overrides(corpus, tmp_path / "run", "data.max_duration=6")
    assert main(["train", *options, *settings]) == EXIT_FAILED
    out = " ".join(capsys.readouterr().out.split())
    assert "out of memory" in out
    assert any(name in out for name in refused)


@pytest.mark.parametrize("limit", [1.0, 5.0, 7.9, 40.0, 100.0, 3000.0])
def test_search_finds_the_limit_with_few_trials(limit: float) -> None:
    trials: list[float] = []

    def fits(value: float) -> bool:
        trials.append(value)
        return value <= limit

    found = search_largest(fits, 60.0, math.inf)
    assert found is not None
    assert limit / 1.05 <= found <= limit
    assert len(trials) <= 16


def test_search_ends_if_nothing_or_everything_fits() -> None:
    assert search_largest(lambda value: False, 60.0, math.inf) is None
    assert search_largest(lambda value: True, 60.0, 500.0) == 960.0


@pytest.mark.slow
def test_find_max_duration_searches_by_memory(
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    size = SpeechTask.size

    def recorded(self: SpeechTask, batch: Batch) -> object:
        sizes.append(batch.features_NTF.size(0) * batch.features_NTF.size(1))
        return size(self, batch)

    # Pretend that a padded frame takes 1 MiB; 900 frames are about 8 seconds.
    monkeypatch.setattr(SpeechTask, "size", recorded)
    monkeypatch.setattr(dry_run, "peak", lambda device: sizes[-1] * 2**20)
    settings = tiny_overrides(corpus, tmp_path / "run", "data.max_duration=4")
    limit = 900 / 1024
    assert main(["train", "--find-max-duration", "--memory-limit", str(limit), *settings]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("largest that fits")]
    found = int(line.rpartition("=")[2])
    assert 6 <= found <= 9
    config = tiny_experiment(corpus, tmp_path / "run", f"data.max_duration={found}")
    frames = DryRun(config).scan(found, 1000).largest["padded frames"].frames
    assert frames <= 900
    assert not (tmp_path / "run").exists()


def test_find_max_duration_on_a_cpu_needs_a_limit(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tiny_overrides(corpus, tmp_path / "run")
    assert main(["train", "--find-max-duration", *settings]) == EXIT_FAILED
    assert "--memory-limit" in capsys.readouterr().err


def test_find_max_duration_on_a_cpu_needs_peaks_that_fall(
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pruned_rnnt.train.engine.memory.reset_peak", lambda device: False)
    options = ["--find-max-duration", "--memory-limit", "1"]
    assert main(["train", *options, *tiny_overrides(corpus, tmp_path / "run")]) == EXIT_FAILED
    assert "--find-max-duration needs Linux" in capsys.readouterr().err


@pytest.mark.gpu
def test_find_max_duration_on_a_gpu(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tiny_overrides(corpus, tmp_path / "run", "train.device=cuda")
    assert main(["train", "--dry-run", *settings]) == 0
    assert "GPU" in capsys.readouterr().out
    assert main(["train", "--find-max-duration", *settings]) == 0
    assert "the whole training set" in capsys.readouterr().out
    before = torch.cuda.memory_allocated()
    small = ["train", "--find-max-duration", "--memory-limit", "1e-4", *settings]
    assert main(small) == EXIT_FAILED
    assert "not even data.max_duration=" in capsys.readouterr().out
    assert torch.cuda.memory_allocated() < before + 2**28


@pytest.mark.parametrize("check", [["--dry-run"], ["--find-max-duration", "--memory-limit", "1"]])
def test_as_many_batches_are_searched_as_the_option_says(
    check: list[str], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []

    def scan(self: DryRun, max_duration: float, limit: int) -> None:
        limits.append(limit)
        raise UsageError("seen")

    monkeypatch.setattr(DryRun, "scan", scan)
    options = ["--scan-batches", "7", *check]
    assert main(["train", *options, *tiny_overrides(corpus, tmp_path / "run")]) == EXIT_USAGE
    assert limits == [7]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("--dry-run --scan-batches 0", "--scan-batches is 0, needs a finite number above 0"),
        ("--estimate --estimate-seconds -1", "--estimate-seconds is -1.0, needs a finite number"),
        ("--estimate --estimate-seconds nan", "--estimate-seconds is nan, needs a finite number"),
        ("--find-max-duration --memory-limit 0", "--memory-limit is 0.0, needs a finite number"),
        ("--memory-limit 1", "--memory-limit needs --find-max-duration"),
        ("--dry-run --memory-limit 1", "--memory-limit needs --find-max-duration"),
        ("--dry-run --estimate-seconds 3", "--estimate-seconds needs --estimate"),
        ("--scan-batches 5", "--scan-batches needs --dry-run or --find-max-duration or --estimate"),
    ],
)
def test_options_of_other_checks_are_refused(
    options: str, error: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tiny_overrides(corpus, tmp_path / "run")
    assert main(["train", *options.split(), *settings]) == EXIT_USAGE
    assert error in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("other", ["--find-max-duration", "--estimate"])
def test_checks_exclude_each_other(other: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=str(EXIT_USAGE)):
        main(["train", "--dry-run", other])
    assert f"argument {other}: not allowed with argument --dry-run" in capsys.readouterr().err


def test_trials_have_the_kernels_of_the_training(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(available, "_mode", "auto")
    DryRun(tiny_experiment(corpus, tmp_path / "run", "train.fused_kernels=off"))
    assert available._mode == "off"
