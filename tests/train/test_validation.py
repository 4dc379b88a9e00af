"""Validation: the same for any number of processes, and robust to single failing batches."""

from __future__ import annotations

import json
import math
import re
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.model.speech_model import ModelLosses, TransducerModel
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.log import RunLog, read_metrics
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.tasks.speech_task import SpeechTask
from pruned_rnnt.train.tasks.validate import (
    ValidationReport,
    band_masses,
    least_frames,
    validate,
)
from tests.tiny_corpus import make_corpus, speech_trainer, tiny_experiment
from tests.train.failures import run_out_of_memory
from tests.train.kill_loop import results
from tests.train.processes import run_ranks
from tests.train.run_files import Killed, checkpoint_of


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), dev=8)


def experiment(corpus: Path, run: Path, *overrides: str) -> ExperimentConfig:
    """With validation batches of at most three utterances."""
    return tiny_experiment(corpus, run, "data.valid_max_duration=2.5", *overrides)


def fail_in_validation(monkeypatch: pytest.MonkeyPatch, passes: set[int]) -> None:
    """Let these forward passes (from 1) in evaluation mode run out of memory."""
    forward, seen = TransducerModel.forward, 0

    def failing(self: TransducerModel, features_NTF: Tensor, *rest: Any) -> ModelLosses:
        nonlocal seen
        if not self.training:
            seen += 1
            if seen in passes:
                run_out_of_memory(features_NTF.device)
        losses: ModelLosses = forward(self, features_NTF, *rest)
        return losses

    monkeypatch.setattr(TransducerModel, "forward", failing)


def test_missing_validation_set_is_an_error_before_training(corpus: Path, tmp_path: Path) -> None:
    config = experiment(corpus, tmp_path / "run", "data.valid=nosuch")
    with pytest.raises(FileNotFoundError, match=r"no split 'nosuch'.*name one of these"):
        speech_trainer(config)
    empty = make_corpus(tmp_path / "empty", train=4, dev=0)
    with pytest.raises(ValueError, match=r"split 'dev' of .*empty has no utterances.*data\.valid"):
        speech_trainer(experiment(empty, tmp_path / "run"))


@pytest.mark.slow
def test_interrupted_validation_is_repeated(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["train.steps=3", "train.validate_every=2"]
    straight = experiment(corpus, tmp_path / "straight", *settings)
    speech_trainer(straight).run()
    config = experiment(corpus, tmp_path / "run", *settings)
    measure = SpeechTask.validate

    def killed(self: SpeechTask, step: int, log: RunLog | None) -> float | None:
        measure(self, step, log)  # writes its line
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(SpeechTask, "validate", killed)
        with pytest.raises(Killed):
            speech_trainer(config).run()
    trainer = speech_trainer(config)
    assert trainer.state.counters.step == 2
    assert trainer.run() == "finished"
    assert results(config) == results(straight)
    for step in (2, 3):
        assert checkpoint_of(config.folder, step) == checkpoint_of(straight.folder, step)
    assert trainer.checkpoints.best() is not None


@pytest.mark.slow
def test_preemption_skips_the_validation(corpus: Path, tmp_path: Path) -> None:
    config = experiment(corpus, tmp_path / "run", "train.steps=2", "train.validate_every=1")
    trainer = speech_trainer(config)
    trainer.stop_signals.received = signal.SIGTERM
    assert trainer.run() == "preempted"
    assert trainer.state.counters.step == 1
    assert [line["group"] for line in read_metrics(config.folder)] == ["train"]
    speech_trainer(config).run()
    groups = [(line["group"], line["step"]) for line in read_metrics(config.folder)]
    assert groups == [("train", 1), ("valid", 1), ("train", 2), ("valid", 2)]


def test_run_ends_with_one_validation(corpus: Path, tmp_path: Path) -> None:
    settings = ["train.steps=2", "train.save_every=1", "train.validate_every=99"]
    config = experiment(corpus, tmp_path / "run", *settings)
    for _ in range(2):
        trainer = speech_trainer(config)
        assert trainer.run() == "finished"
        assert valid_line(config.folder)["step"] == 2
        assert trainer.checkpoints.best() == trainer.checkpoints.path(2)


def valid_line(run: Path) -> dict[str, Any]:
    (line,) = [line for line in read_metrics(run) if line["group"] == "valid"]
    return line


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_validation_skips_a_batch_that_does_not_fit(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device: str,
) -> None:
    config = experiment(corpus, tmp_path / "run", "train.steps=1", f"train.device={device}")
    batches = list(speech_trainer(config).task.data.valid_loader())
    assert len(batches) > 2
    fail_in_validation(monkeypatch, {2})
    assert speech_trainer(config).run() == "finished"
    assert valid_line(config.folder)["skipped_batches"] == 1
    (line,) = [r.message for r in caplog.records if "continues without" in r.message]
    assert "out of memory" in line
    assert "lattice_nodes" in line
    dump = json.loads((config.folder / "bad_steps/validation-00000001-rank-0-0.json").read_text())
    assert [u["id"] for u in dump["utterances"]] == list(batches[1].ids)
    words = sum(len(text.split()) for b in batches for text in b.texts if b is not batches[1])
    log = (config.folder / "train.log").read_text().splitlines()
    assert f" / {words}, " in next(line for line in log if " WER " in line)


@pytest.mark.slow
def test_validation_without_any_fitting_batch_has_no_score(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fail_in_validation(monkeypatch, set(range(100)))
    config = experiment(corpus, tmp_path / "run", "train.steps=1")
    trainer = speech_trainer(config)
    assert trainer.run() == "finished"
    assert trainer.checkpoints.best() is None
    assert "wer" not in valid_line(config.folder)
    assert "WER unknown" in caplog.text


def test_unreadable_validation_set_is_a_warning(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = experiment(corpus, tmp_path / "run", "train.steps=1")
    trainer = speech_trainer(config)
    monkeypatch.setattr(trainer.task.data, "valid_loader", lambda: iter([]))
    assert trainer.run() == "finished"
    (line,) = [r for r in caplog.records if "step 1 validation" in r.message]
    assert line.levelname == "WARNING"
    assert "no reference word of data.valid=dev was read" in line.message
    assert "wer" not in valid_line(config.folder)


@pytest.mark.parametrize(
    "loss",
    [
        ("kind=pruned", "rnnt_type=modified"),
        ("kind=full", "rnnt_type=modified"),
        ("kind=ctc",),
        # The band needs frames even where symbols need none.
        ("kind=pruned", "s_range=2"),
        ("kind=pruned", "s_range=2", "durations=[0,1,2]"),
    ],
)
def test_utterances_too_short_for_their_symbols_are_reported_and_skipped(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, loss: tuple[str, ...]
) -> None:
    settings = [*(f"loss.{setting}" for setting in loss), "data.valid_max_duration=60"]
    task = speech_trainer(tiny_experiment(corpus, tmp_path / "run", *settings)).task
    (batch,) = task.data.valid_loader()
    # One encoder frame for several words, and none at all.
    lengths_N = batch.feature_lengths_N.clone()
    lengths_N[1:3] = torch.tensor([9, 5])
    short = replace(batch, feature_lengths_N=lengths_N)
    report = validate(
        task.model, partial(task.losses, step=0), [short], task.data.tokenizer, ranks=Ranks()
    )
    rest = with_rows(batch, [0, *range(3, len(batch))])
    expected = validate(
        task.model, partial(task.losses, step=0), [rest], task.data.tokenizer, ranks=Ranks()
    )
    assert expected.without_loss == ()
    assert report.without_loss == batch.ids[1:3]
    assert report.losses == pytest.approx(expected.losses, rel=1e-5)
    words = [len(text.split()) for text in batch.texts]
    assert report.errors.words.reference_words == sum(words) - words[2]

    # A batch with no other utterance.
    task.data.valid_loader = lambda: [with_rows(short, [2])]  # type: ignore
    assert task.validate(0, None) is None
    assert re.search(f"1 utterances have no finite loss.*{short.ids[2]}", caplog.text)


@pytest.mark.parametrize("durations", ["[]", "[0,1]", "[1,2]"])
def test_all_frames_that_the_band_needs_are_enough(
    corpus: Path, tmp_path: Path, durations: str
) -> None:
    settings = ["loss.s_range=2", f"loss.durations={durations}"]
    task = speech_trainer(experiment(corpus, tmp_path / "run", *settings)).task
    batch = next(iter(task.data.valid_loader()))
    for extra in (0, -1):
        frames_N = least_frames(batch, task.model.loss_config) + extra
        # As many feature frames as give the encoder these frames.
        cut = replace(batch, feature_lengths_N=4 * frames_N + 3)
        assert (
            task.model.encoder.output_lengths(cut.feature_lengths_N).tolist() == frames_N.tolist()
        )
        report = validate(
            task.model, partial(task.losses, step=0), [cut], task.data.tokenizer, ranks=Ranks()
        )
        assert report.without_loss == (batch.ids if extra else ())


def test_infinite_loss_is_excluded_from_the_mean(corpus: Path, tmp_path: Path) -> None:
    task = speech_trainer(experiment(corpus, tmp_path / "run")).task
    batch = next(iter(task.data.valid_loader()))
    features = batch.features_NTF.clone()
    features[-1, 3] = float("nan")
    spoiled = replace(batch, features_NTF=features)
    report = validate(
        task.model, partial(task.losses, step=0), [spoiled], task.data.tokenizer, ranks=Ranks()
    )
    assert report.without_loss == batch.ids[-1:]
    assert all(math.isfinite(value) for value in {**report.losses, **report.masses}.values())


def test_losses_of_another_type_are_refused(corpus: Path, tmp_path: Path) -> None:
    task = speech_trainer(experiment(corpus, tmp_path / "run")).task
    with pytest.raises(TypeError, match=r"returned a tuple: .* ModelLosses that super\(\)\.losses"):
        validate(
            task.model,
            lambda _batch: (),  # type: ignore[arg-type, return-value]
            task.data.valid_loader(),
            task.data.tokenizer,
            ranks=Ranks(),
        )


def with_rows(batch: Batch, rows: list[int]) -> Batch:
    """An independent implementation of `Batch.select`."""
    tensors = ("features_NTF", "feature_lengths_N", "targets_NU", "target_lengths_N")
    tuples = ("texts", "ids", "durations", "words", "languages")
    return replace(
        batch,
        **{name: getattr(batch, name)[rows] for name in tensors},
        **{name: tuple(getattr(batch, name)[row] for row in rows) for name in tuples},
    )


def test_masses_are_means_over_all_utterances(corpus: Path, tmp_path: Path) -> None:
    config = experiment(corpus, tmp_path / "run", "loss.s_range=2")
    task = speech_trainer(config).task
    batches = list(task.data.valid_loader())
    report = validate(
        task.model, partial(task.losses, step=0), batches, task.data.tokenizer, ranks=Ranks()
    )
    task.model.eval()
    rows: dict[str, list[float]] = {}
    for batch in batches:
        with torch.no_grad():
            losses = task.losses(batch, 0)
        for name, values_N in band_masses(losses, batch, config.loss.rnnt_type).items():
            rows.setdefault(name, []).extend(values_N.tolist())
    assert set(report.masses) == {"retained_mass", "retained_symbol_mass", "band_edge_mass"}
    for name, values in rows.items():
        assert len(values) == 8
        assert report.masses[name] == pytest.approx(sum(values) / 8)
    assert report.example_batch is not None
    assert report.example_batch.ids == batches[0].ids


def validated(
    ranks: Ranks, config: ExperimentConfig, passes: set[int]
) -> tuple[ValidationReport, float | None]:
    """Validate on all processes; on rank 1 these passes run out of memory."""
    trainer = speech_trainer(config, ranks)
    task = trainer.task
    with pytest.MonkeyPatch.context() as patch:
        fail_in_validation(patch, passes if ranks.rank == 1 else set())
        batches = task.data.valid_loader()
        report = validate(
            task.model, partial(task.losses, step=0), batches, task.data.tokenizer, ranks=ranks
        )
        score = task.validate(0, None)
    return report, score


@pytest.mark.slow
def test_two_processes_measure_the_same_as_one(corpus: Path, tmp_path: Path) -> None:
    config = experiment(corpus, tmp_path / "run")
    ((one, score),) = [validated(Ranks(), config, set())]
    for report, its_score in run_ranks(2, validated, config, set()):
        assert its_score == score
        assert report.errors == one.errors
        assert report.losses == pytest.approx(one.losses, rel=1e-5)
        assert report.masses == pytest.approx(one.masses, rel=1e-5)


@pytest.mark.slow
def test_processes_agree_when_all_batches_of_one_fail(corpus: Path, tmp_path: Path) -> None:
    config = experiment(corpus, tmp_path / "run")
    (first, score), (second, other_score) = run_ranks(2, validated, config, set(range(100)))
    assert score == other_score
    assert first.losses == second.losses
    assert first.errors == second.errors
    assert first.too_large == ()
    assert second.example_batch is None
    assert len(second.too_large) > 1


def test_ids_that_look_like_repeated_ones_count(corpus: Path, tmp_path: Path) -> None:
    task = speech_trainer(tiny_experiment(corpus, tmp_path / "run")).task
    assert isinstance(task, SpeechTask)
    batches = list(task.data.valid_loader())
    renamed = [replace(batch, ids=tuple(f"{name}_dup0" for name in batch.ids)) for batch in batches]
    plain, found = (
        validate(task.model, partial(task.losses, step=0), each, task.data.tokenizer, ranks=Ranks())
        for each in (batches, renamed)
    )
    assert found.errors == plain.errors
    assert found.losses == plain.losses
    assert found.errors.words.reference_words > 0
