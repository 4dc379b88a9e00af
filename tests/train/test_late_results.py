"""Results that the host reads after the passes of the next step, as on CUDA, change no training."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.train.engine.bad_steps import TrainingStopped
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.log import read_metrics
from pruned_rnnt.train.engine.report import StepReport
from pruned_rnnt.train.engine.step import Step, Stepper
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.tasks.speech_task import SpeechTask
from tests.tiny_corpus import speech_trainer, tiny_experiment
from tests.train.failures import run_out_of_memory
from tests.train.processes import run_ranks
from tests.train.run_files import checkpoint_of, killed_at, losses_of

OVERRIDES = [
    "data.max_duration=3",
    "optimiser.name=scaled_adam",
    "schedule.kind=eden",
    "train.steps=9",
    "train.log_every=4",
    "train.save_every=3",
    "train.keep_last=10",
    "train.average_decay=0.9",
    "data.augmentation.spec_augment.enabled=true",
]


class FailingSteps:
    """Makes `SpeechTask.losses` fail in some steps, and records the order of events.

    events: ("passes" | "result", step), in order.
    """

    def __init__(self, patch: pytest.MonkeyPatch, nan: Sequence[int], memory: Sequence[int] = ()):
        self.events: list[tuple[str, int]] = []
        self.spoiled: list[str] = []
        self.unread: list[int] = []
        losses, read, call = SpeechTask.losses, Stepper._read, Stepper.__call__

        def failing(task: SpeechTask, batch: Batch, step: int) -> Any:
            if step + 1 in memory:
                run_out_of_memory(torch.device("cpu"))
            if step + 1 in nan:
                features = batch.features_NTF.clone()
                features[-1, 3] = float("nan")
                self.spoiled.append(batch.ids[-1])
                batch = dataclasses.replace(batch, features_NTF=features)
            self.events.append(("passes", step + 1))
            return losses(task, batch, step)

        def numbered(stepper: Stepper, batches: Any, step: int, **options: Any) -> Step:
            self.unread.append(step + 1)
            return call(stepper, batches, step, **options)

        def recorded(stepper: Stepper, step: Step) -> StepReport:
            self.events.append(("result", self.unread.pop(0)))
            return read(stepper, step)

        patch.setattr(SpeechTask, "losses", failing)
        patch.setattr(Stepper, "__call__", numbered)
        patch.setattr(Stepper, "_read", recorded)


def train(config: ExperimentConfig, *, late: bool, ranks: Ranks | None = None) -> Any:
    trainer = speech_trainer(config, ranks)
    trainer.stepper.reads_late = late
    assert trainer.run() == "finished"
    return trainer


def files_of(run: Path) -> dict[str, Any]:
    """What a run leaves, without times and the name of the run."""
    steps = {path.name: json.loads(path.read_text()) for path in run.glob("bad_steps/*.json")}
    lines = read_metrics(run)
    metrics = [
        {
            key: value
            for key, value in line.items()
            if "per_second" not in key and "seconds" not in key
        }
        for line in lines
    ]
    names = sorted(path.name for path in run.glob("checkpoints/*.pt"))
    checkpoints = {name: checkpoint_of(run, int(name[5:13])) for name in names}
    return {"bad_steps": steps, "metrics": metrics, "checkpoints": checkpoints}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "nan", "memory"),
    [
        ([], [], []),
        ([], [2, 3, 7], []),
        (["train.accumulate=2"], [1, 5], [3]),
        (["train.precision=float16"], [4], [6]),
        (["optimiser.name=scaled_adam"], [2, 9], [8]),
    ],
    ids=["good", "bad", "accumulation", "float16", "scaled_adam"],
)
def test_run_equals_one_whose_results_are_read_at_once(
    corpus: Path,
    tmp_path: Path,
    overrides: list[str],
    nan: list[int],
    memory: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for name, late in (("late", True), ("at_once", False)):
        config = tiny_experiment(corpus, tmp_path / name, *OVERRIDES, *overrides)
        with monkeypatch.context() as patch:
            failing = FailingSteps(patch, nan, memory)
            trainer = train(config, late=late)
        # Steps 4, 6 and 8 are logged or saved.
        if late and not memory and not overrides:
            order = [event for event in failing.events if event[1] in (5, 6, 7, 8)]
            assert order == [
                ("passes", 5), ("passes", 6), ("result", 5), ("result", 6),
                ("passes", 7), ("passes", 8), ("result", 7), ("result", 8),
            ]  # fmt: skip
        assert trainer.state.counters.bad_steps >= len(nan) + len(memory)
        found.append(files_of(config.folder))
    late_files, files = found
    assert len(files["checkpoints"]) >= 3
    assert len(files["bad_steps"]) >= len(nan) + len(memory)
    assert late_files == files


@pytest.mark.slow
def test_run_continues_bit_for_bit_from_a_checkpoint(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies while the result of step 8 is not read; the checkpoint is of step 6."""
    straight = tiny_experiment(corpus, tmp_path / "straight", *OVERRIDES, "train.log_every=1")
    resumed = tiny_experiment(corpus, tmp_path / "resumed", *OVERRIDES, "train.log_every=3")
    with monkeypatch.context() as patch:
        FailingSteps(patch, [5, 8])
        train(straight, late=True)
    with monkeypatch.context() as patch:
        FailingSteps(patch, [5, 8])
        with killed_at(7):
            train(resumed, late=True)
    with monkeypatch.context() as patch:
        FailingSteps(patch, [5, 8])
        assert train(resumed, late=True).state.counters.bad_steps == 2
    assert losses_of(resumed.folder)[-1][0] == 9
    one, other = (checkpoint_of(run.folder, 9) for run in (straight, resumed))
    assert {key: one[key] for key in one if key != ".config.train.log_every"} == {
        key: other[key] for key in other if key != ".config.train.log_every"
    }


@pytest.mark.parametrize("late", [True, False])
def test_consecutive_bad_steps_stop_training_at_the_same_step(
    corpus: Path, tmp_path: Path, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_experiment(corpus, tmp_path / "run", *OVERRIDES, "train.max_bad_steps=2")
    failing = FailingSteps(monkeypatch, [1, 4, 5])
    with pytest.raises(TrainingStopped, match=r"at step 5: 2 steps in a row.*bad_steps"):
        train(config, late=late)
    assert ("passes", 7) not in failing.events
    dump = json.loads((config.folder / "bad_steps/step-00000005-rank-0.json").read_text())
    assert [utterance["id"] for utterance in dump["utterances"]] == [failing.spoiled[2]]


def train_process(ranks: Ranks, config: ExperimentConfig, late: bool) -> int:
    """Number of skipped steps; step 2 is bad in process 1, step 4 does not fit in process 0."""
    patch = pytest.MonkeyPatch()
    FailingSteps(patch, [2] if ranks.rank == 1 else [], [4] if ranks.rank == 0 else [])
    bad_steps: int = train(config, late=late, ranks=ranks).state.counters.bad_steps
    patch.undo()
    return bad_steps


@pytest.mark.slow
def test_two_processes_equal_ones_that_read_at_once(corpus: Path, tmp_path: Path) -> None:
    found = []
    for name, late in (("late", True), ("at_once", False)):
        config = tiny_experiment(corpus, tmp_path / name, *OVERRIDES)
        assert run_ranks(2, train_process, config, late) == [2, 2]
        found.append(files_of(config.folder))
    assert found[0] == found[1]
    assert set(found[0]["bad_steps"]) == {
        "step-00000002-rank-1.json",
        "step-00000004-rank-0.json",
    }
