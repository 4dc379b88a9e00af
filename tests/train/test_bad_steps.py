"""Steps with infinite or NaN values are reported and skipped; too many of them stop training."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.train.engine.bad_steps import TrainingStopped
from pruned_rnnt.train.engine.checkpoint import load_checkpoint
from pruned_rnnt.train.engine.log import log_file, read_metrics
from pruned_rnnt.train.engine.step import Step
from tests.tiny_corpus import speech_trainer, tiny_experiment
from tests.train.failures import check_training_stops


def spoil_batches(monkeypatch: pytest.MonkeyPatch, steps: Sequence[int]) -> list[str]:
    """Put NaN into one utterance of these steps; returns a list that its ids are added to."""
    from pruned_rnnt.train.engine.step import Stepper

    spoiled: list[str] = []
    call = Stepper.__call__

    def with_nan(self: Stepper, batches: Sequence[Batch], step: int, **options: Any) -> Step:
        if step + 1 in steps:
            batch = batches[0]
            features = batch.features_NTF.clone()
            features[-1, 3] = float("nan")
            spoiled.append(batch.ids[-1])
            batches = [dataclasses.replace(batch, features_NTF=features), *batches[1:]]
        return call(self, batches, step, **options)

    monkeypatch.setattr(Stepper, "__call__", with_nan)
    return spoiled


@pytest.mark.slow
def test_bad_batch_is_reported_and_skipped(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spoiled = spoil_batches(monkeypatch, [2])
    config = tiny_experiment(corpus, tmp_path / "run", "train.save_every=1", "train.keep_last=9")
    trainer = speech_trainer(config)
    trainer.run()
    assert trainer.state.counters.bad_steps == 1
    assert f"step 2 skipped: infinite or NaN loss; utterances: {spoiled[0]};" in caplog.text
    dump = json.loads((config.folder / "bad_steps/step-00000002-rank-0.json").read_text())
    assert [utterance["id"] for utterance in dump["utterances"]] == spoiled
    assert dump["batches"][0]["features"][2] == 80
    before = load_checkpoint(config.folder / "checkpoints/step-00000001.pt")["model"]
    after = load_checkpoint(config.folder / "checkpoints/step-00000002.pt")["model"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def test_float16_scale_is_halved_until_gradients_fit(corpus: Path, tmp_path: Path) -> None:
    config = tiny_experiment(
        corpus,
        tmp_path / "run",
        "train.precision=float16",
        "train.save_every=1",
        "train.max_bad_steps=1",  # of which halvings are none
    )
    trainer = speech_trainer(config)
    trainer.stepper.scaler.load_state_dict(
        {**trainer.stepper.scaler.state_dict(), "scale": 2.0**30, "_growth_tracker": 0}
    )
    trainer.run()
    scales = [line["grad_scale"] for line in read_metrics(config.folder) if "grad_scale" in line]
    assert scales[0] == 2.0**29
    assert trainer.state.counters.bad_steps >= 1
    dump = json.loads((config.folder / "bad_steps/step-00000001-rank-0.json").read_text())
    assert dump["problem"] == "gradient beyond float16; the loss scale is halved"
    saved = load_checkpoint(config.folder / "checkpoints/step-00000004.pt")["scaler"]
    assert saved["scale"] == scales[-1]


def test_too_many_consecutive_bad_steps_stop_training(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_batches(monkeypatch, [1, 3, 4])
    message = r"at step 4: 2 steps in a row.*bad_steps"
    check_training_stops(corpus, tmp_path / "run", message, "train.max_bad_steps=2")


def test_epoch_without_batches_stops_training(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_experiment(corpus, tmp_path / "run")
    trainer = speech_trainer(config)
    monkeypatch.setattr(type(trainer.state.loader), "__iter__", lambda self: iter([]))
    with pytest.raises(TrainingStopped, match="epoch 0: the training set has no batch"):
        trainer.run()
    log = (config.folder / "train.log").read_text()
    assert "ERROR training ended by TrainingStopped: training stopped in epoch 0" in log
    assert "Traceback" in log


def test_other_ranks_write_warnings_to_their_own_files(tmp_path: Path) -> None:
    logger = logging.getLogger("pruned_rnnt.train")
    with log_file(tmp_path, rank=3):
        logger.info("usual")
        assert not list(tmp_path.iterdir())
        logger.warning("bad audio")
    logger.warning("later")
    (path,) = tmp_path.iterdir()
    assert path.name == "train-rank-3.log"
    (line,) = path.read_text().splitlines()
    assert line.endswith("WARNING bad audio")


def test_warnings_before_a_run_continues_are_in_its_log(corpus: Path, tmp_path: Path) -> None:
    settings = ["train.steps=2", "train.save_every=1", "train.keep_last=2"]
    config = tiny_experiment(corpus, tmp_path / "run", *settings)
    speech_trainer(config).run()
    damaged = tmp_path / "run/checkpoints/step-00000002.pt"
    damaged.write_bytes(b"")
    changed = tiny_experiment(corpus, tmp_path / "run", *settings, "train.seed=7")
    trainer = speech_trainer(changed, allow_changes=True)
    logging.getLogger("pruned_rnnt.train").warning("of something else")
    trainer.run()
    lines = (tmp_path / "run/train.log").read_text().splitlines()
    (at,) = (i for i, line in enumerate(lines) if "continuing at step 1 of 2" in line)
    assert lines[at - 2].endswith(f"WARNING {damaged} is empty")
    assert "WARNING configuration changed: train.seed" in lines[at - 1]
    assert not any("of something else" in line for line in lines)
