"""Out of memory: the step is reported and skipped, and training continues or stops."""

from __future__ import annotations

import dataclasses
import itertools
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_FAILED
from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.model.speech_model import ModelLosses
from pruned_rnnt.system.out_of_memory import is_out_of_memory
from pruned_rnnt.train.engine.checkpoint import load_checkpoint
from pruned_rnnt.train.engine.memory import out_of_memory_in
from pruned_rnnt.train.optim.conditional import AdamW
from pruned_rnnt.train.tasks.speech_task import SpeechTask
from tests.tiny_corpus import speech_trainer, tiny_experiment, tiny_overrides
from tests.train.failures import FailInBackward, check_training_stops, run_out_of_memory


def failing_at(
    monkeypatch: pytest.MonkeyPatch, forward: set[int], backward: set[int]
) -> dict[int, Batch]:
    """Let passes of these steps (from 1) fail; returns a dict that all batches are added to."""
    seen: dict[int, Batch] = {}
    losses = SpeechTask.losses

    def failing(self: SpeechTask, batch: Batch, step: int) -> ModelLosses:
        if self.model.training:
            seen[step + 1] = batch
            if step + 1 in forward:
                run_out_of_memory(batch.features_NTF.device)
        found = losses(self, batch, step)
        if self.model.training and step + 1 in backward:
            found = dataclasses.replace(found, objective=FailInBackward.apply(found.objective))
        return found

    monkeypatch.setattr(SpeechTask, "losses", failing)
    return seen


def check_skipped(corpus: Path, run: Path, seen: dict[int, Batch], *overrides: str) -> None:
    config = tiny_experiment(corpus, run, "train.save_every=1", "train.keep_last=9", *overrides)
    trainer = speech_trainer(config)
    assert trainer.run() == "finished"
    assert trainer.state.counters.bad_steps == 2
    parameters = [
        load_checkpoint(run / f"checkpoints/step-0000000{step}.pt")["model"]
        for step in (1, 2, 3, 4)
    ]
    moved = [
        any(not torch.equal(old[name], new[name]) for name in old)
        for old, new in itertools.pairwise(parameters)
    ]
    assert moved == [False, False, True]
    for step in (2, 3):
        dump = json.loads((run / f"bad_steps/step-0000000{step}-rank-0.json").read_text())
        assert "memory" in dump["problem"]
        assert [u["id"] for u in dump["utterances"]] == list(seen[step].ids)
        (shapes,) = dump["batches"]
        utterances, frames, symbols = shapes["lattice"]
        assert utterances == len(seen[step])
        assert symbols == seen[step].targets_NU.size(1) + 1
        assert shapes["lattice_nodes"] == utterances * frames * symbols


@pytest.mark.slow
def test_out_of_memory_step_is_reported_and_skipped(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen = failing_at(monkeypatch, forward={2}, backward={3})
    check_skipped(corpus, tmp_path / "run", seen)
    (line,) = [r.message for r in caplog.records if r.message.startswith("step 2 skipped")]
    assert "out of memory" in line
    assert f"utterances: {seen[2].ids[0]}" in line
    assert "lattice_nodes" in line
    assert "2 skipped" in next(r.message for r in caplog.records if "step 4/4" in r.message)


@pytest.mark.slow
def test_memory_that_the_model_keeps_is_released(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = []
    monkeypatch.setattr(SpeechTask, "release_memory", lambda task: released.append(len(seen)))
    seen = failing_at(monkeypatch, forward={2}, backward={3})
    speech_trainer(tiny_experiment(corpus, tmp_path / "run")).run()
    assert released == [2, 3]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_out_of_memory_step_is_skipped_on_a_gpu(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    seen = failing_at(monkeypatch, forward={2}, backward={3})
    settings = ["train.device=cuda", f"train.precision={precision}"]
    check_skipped(corpus, tmp_path / "run", seen, *settings)


@pytest.mark.slow
def test_float16_continues_after_an_out_of_memory_step(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The scaler raises an error for a step without any gradient.
    seen = failing_at(monkeypatch, forward={2}, backward={3})
    check_skipped(corpus, tmp_path / "run", seen, "train.precision=float16")


@pytest.mark.slow
def test_too_many_out_of_memory_steps_stop_training(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_at(monkeypatch, forward={1, 3, 4}, backward=set())
    message = r"at step 4: 2 steps in a row.*out of memory"
    check_training_stops(corpus, tmp_path / "run", message, "train.max_bad_steps=2")


def test_out_of_memory_in_the_update_stops_training(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        run_out_of_memory("cpu")

    monkeypatch.setattr(AdamW, "step", fail)
    message = "memory ran out in the optimiser's update"
    check_training_stops(corpus, tmp_path / "run", message)


def test_other_errors_are_raised(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(SpeechTask, "losses", fail)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        speech_trainer(tiny_experiment(corpus, tmp_path / "run")).run()


def test_error_caused_by_out_of_memory_counts_as_out_of_memory() -> None:
    def work() -> None:
        try:
            run_out_of_memory("cpu")
        finally:
            raise RuntimeError("CUDA error: operation failed due to an error during capture")

    assert out_of_memory_in(work).startswith("CUDA error: operation failed")


def test_model_that_does_not_fit_is_a_one_line_error(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(SpeechTask, "__init__", lambda *arguments: run_out_of_memory("cpu"))
    assert main(["train", *tiny_overrides(corpus, tmp_path / "run")]) == EXIT_FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pruned-rnnt train: memory ran out: ")


def test_failed_work_releases_its_memory() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def work() -> None:
        values = torch.zeros(3)
        held.append(weakref.ref(values))
        raise MemoryError  # has no text

    assert out_of_memory_in(work) == "MemoryError"
    assert held[0]() is None
    assert out_of_memory_in(lambda: None) == ""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_mean_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
