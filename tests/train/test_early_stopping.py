"""Training ends when validations no longer improve, also if it was interrupted in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pruned_rnnt.train import BatchSize, TrainConfig, Trainer
from pruned_rnnt.train.tasks.speech_task import SpeechTask
from tests.tiny_corpus import speech_trainer, tiny_experiment
from tests.train.run_files import checkpoint_of, killed_at

# The score of the validation at each step, from 1. The lowest before step 6 is that of step 2.
SCORES = (0.5, 0.4, 0.45, 0.4, 0.41, 0.3, 0.6, 0.6)


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeechTask, "validate", lambda self, step, log: SCORES[step - 1])


def train(corpus: Path, run: Path, patience: int) -> int:
    """The number of steps after training for at most 8."""
    every_step = ["train.steps=8", "train.validate_every=1", "train.keep_last=10"]
    patience_setting = f"train.early_stopping_patience={patience}"
    trainer = speech_trainer(tiny_experiment(corpus, run, *every_step, patience_setting))
    assert trainer.run() == "finished"
    return trainer.state.counters.step


@pytest.mark.parametrize(("patience", "last"), [(0, 8), (1, 3), (2, 4), (3, 5), (4, 8)])
def test_training_ends_after_validations_without_a_better_one(
    tmp_path: Path, patience: int, last: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pruned_rnnt")
    scores = iter(SCORES)
    trainer = Trainer(
        model=torch.nn.Linear(3, 1),
        batches=[torch.ones(2, 3)] * 8,
        loss=lambda model, batch, step: model(batch)[:, 0],
        size=lambda batch: BatchSize(utterances=2, frames=2),
        validate=lambda model: next(scores),
        settings=TrainConfig(
            folder=str(tmp_path), steps=8, validate_every=1, early_stopping_patience=patience
        ),
    )
    assert trainer.run() == "finished"
    assert trainer.step == last
    notes = [text for text in caplog.messages if "no better validation" in text]
    note = f"at step {last}: no better validation than 0.4000 in the last {patience}"
    assert notes == ([f"training ends {note}"] if last < 8 else [])


@pytest.mark.slow
@pytest.mark.usefixtures("scores")
def test_interrupted_run_keeps_the_count(corpus: Path, tmp_path: Path) -> None:
    assert train(corpus, tmp_path / "straight", 3) == 5
    with killed_at(4):
        train(corpus, tmp_path / "killed", 3)
    assert train(corpus, tmp_path / "killed", 3) == 5
    assert checkpoint_of(tmp_path / "killed", 5) == checkpoint_of(tmp_path / "straight", 5)


@pytest.mark.slow
@pytest.mark.usefixtures("scores")
def test_run_that_ended_early_continues_with_more_patience(corpus: Path, tmp_path: Path) -> None:
    assert train(corpus, tmp_path / "run", 2) == 4
    assert train(corpus, tmp_path / "run", 2) == 4
    assert train(corpus, tmp_path / "run", 3) == 5
    assert train(corpus, tmp_path / "run", 0) == 8
