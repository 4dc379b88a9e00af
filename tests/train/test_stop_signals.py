"""Signals and the death of a data worker end training after it has saved; so does, without saving,
the end of another training process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_FAILED, EXIT_INTERRUPTED
from pruned_rnnt.train.engine.bad_steps import TrainingStopped
from pruned_rnnt.train.engine.checkpoint import load_checkpoint
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.interruptions import is_of_exchange
from pruned_rnnt.train.engine.trainer import Trainer
from pruned_rnnt.train.experiment import ExperimentConfig
from tests.tiny_corpus import speech_trainer, tiny_experiment, tiny_overrides
from tests.train.processes import run_ranks
from tests.train.run_files import losses_of

pytestmark = pytest.mark.slow

# Few batches are prefetched, so that the death of a worker is noticed soon.
WITH_WORKER = ("data.num_workers=1", "data.prefetch_factor=1", "data.max_duration=3")


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> ExperimentConfig:
    config = tiny_experiment(corpus, tmp_path_factory.mktemp("exp") / "straight")
    speech_trainer(config).run()
    return config


@pytest.fixture(autouse=True)
def restored_handlers() -> Iterator[None]:
    """Begin with Python's handlers, and restore those of before after each test.

    A shell starts jobs in the background with SIGINT ignored, and `nohup` with SIGHUP ignored.
    """
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    handlers = [(number, signal.getsignal(number)) for number in numbers]
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in handlers:
        signal.signal(number, handler)


def before_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], None]) -> None:
    """Call `act` right before a step (from 1), when its batches are loaded."""
    set_learning_rate = Trainer._set_learning_rate

    def act_first(self: Trainer) -> None:
        if self.state.counters.step + 1 == step:
            act()
        set_learning_rate(self)

    monkeypatch.setattr(Trainer, "_set_learning_rate", act_first)


def worker_pids() -> list[int]:
    return [worker.pid for worker in multiprocessing.active_children() if worker.pid is not None]


def signal_job(names: Sequence[str]) -> None:
    """Signal every process of the job from outside, like a scheduler or a terminal."""
    pids = [*worker_pids(), os.getpid()]
    assert len(pids) > 2
    for name in names:
        # SIGTERM from their parent would end the workers.
        subprocess.run(["kill", f"-{name}", *map(str, pids)], check=True)


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "USR1"])
def test_run_saves_at_a_signal_and_continues(
    corpus: Path,
    tmp_path: Path,
    straight: ExperimentConfig,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    settings = tiny_overrides(corpus, run, "data.num_workers=2")
    number = signal.Signals[f"SIG{name}"]
    handler = signal.getsignal(number)
    with monkeypatch.context() as patch:
        before_step(patch, 3, lambda: signal_job([name]))
        assert main(["train", *settings]) == 128 + number
    assert signal.getsignal(number) == handler
    shown = capfd.readouterr().err
    assert shown.endswith(f"pruned-rnnt train: stopped by SIG{name}, checkpoint saved\n")
    assert ("Ctrl-C again ends it without saving" in shown) == (name == "INT")
    assert f"stopped by SIG{name} after step 3" in (run / "train.log").read_text()
    assert load_checkpoint(run / "checkpoints/step-00000003.pt")["counters"]["step"] == 3
    assert main(["train", *settings]) == 0
    assert losses_of(run) == losses_of(straight.folder)


def test_a_second_ctrl_c_ends_training_without_saving(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def press_twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    before_step(monkeypatch, 2, press_twice)
    assert main(["train", *tiny_overrides(corpus, tmp_path / "run")]) == EXIT_INTERRUPTED
    assert "pruned-rnnt: interrupted" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("checkpoints/*.pt"))


def test_ignored_signal_stays_ignored(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGHUP is ignored under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before_step(monkeypatch, 2, lambda: os.kill(os.getpid(), signal.SIGHUP))
    assert speech_trainer(tiny_experiment(corpus, tmp_path / "run")).run() == "finished"


def train_signalled(ranks: Ranks, config: ExperimentConfig) -> tuple[str, str | None, int]:
    """Signal rank 1 before its second step; returns outcome, its signal and the steps."""
    trainer = speech_trainer(config, ranks)
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            before_step(patch, 2, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        outcome = trainer.run()
    by = trainer.stop_signals.received
    return outcome, by.name if by is not None else None, trainer.state.counters.step


def test_signal_to_one_process_saves_and_stops_all(corpus: Path, tmp_path: Path) -> None:
    config = tiny_experiment(corpus, tmp_path / "run", "data.max_duration=3")
    results = run_ranks(2, train_signalled, config)
    assert results == [("preempted", None, 2), ("preempted", "SIGUSR1", 2)]
    assert (
        "stopped because another process stops after step 2"
        in (config.folder / "train.log").read_text()
    )
    saved = load_checkpoint(config.folder / "checkpoints/step-00000002.pt")
    assert len(saved["random"]) == 2


def kill_a_worker() -> None:
    os.kill(worker_pids()[0], signal.SIGKILL)


def test_killed_worker_ends_training_with_one_line_after_saving(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = [*WITH_WORKER, "train.steps=8"]
    whole = tiny_experiment(corpus, tmp_path / "whole", *settings)
    speech_trainer(whole).run()
    run = tmp_path / "run"
    arguments = ["train", *tiny_overrides(corpus, run, *settings)]
    with monkeypatch.context() as patch:
        before_step(patch, 2, kill_a_worker)
        capsys.readouterr()
        assert main(arguments) == EXIT_FAILED
    shown = capsys.readouterr().err
    last = shown.splitlines()[-1]
    assert "pruned-rnnt train: training stopped after step " in last
    assert "is killed by signal: Killed. The same command continues" in last
    assert "Traceback" not in shown
    (saved,) = run.glob("checkpoints/*.pt")
    assert 2 <= load_checkpoint(saved)["counters"]["step"] < 8
    assert main(arguments) == 0
    assert losses_of(run) == losses_of(whole.folder)


def train_without_worker(ranks: Ranks, config: ExperimentConfig) -> tuple[str, int]:
    """Kill the worker of rank 1 before its first step; returns outcome or error, and the steps."""
    # As under torchrun; a process of the fork server cannot use the fork server itself.
    multiprocessing.set_start_method("fork", force=True)
    trainer = speech_trainer(config, ranks)
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            before_step(patch, 1, kill_a_worker)
        try:
            outcome: str = trainer.run()
        except TrainingStopped as error:
            outcome = str(error)
    return outcome, trainer.state.counters.step


def test_all_processes_save_when_a_worker_of_one_dies(corpus: Path, tmp_path: Path) -> None:
    # With streamed data, processes exchange before every batch whether all have one.
    settings = [*WITH_WORKER, "data.lazy=true", "train.accumulate=2", "train.steps=8"]
    config = tiny_experiment(corpus, tmp_path / "run", *settings)
    (outcome, step), (reason, last_step) = run_ranks(2, train_without_worker, config)
    assert outcome == "preempted"
    assert f"training stopped after step {last_step}: DataLoader worker" in reason
    assert step == last_step
    saved = load_checkpoint(config.folder / f"checkpoints/step-{step:08d}.pt")
    assert saved["counters"]["batch"] == 2 * step
    assert speech_trainer(config, allow_changes=True).state.counters.step == step


def leave_early(ranks: Ranks, config: ExperimentConfig) -> str:
    """Train in the first process; the other one ends when the training begins."""
    trainer = speech_trainer(config, ranks)
    if not ranks.is_first:
        return ""
    with pytest.raises(TrainingStopped) as stopped:
        trainer.run()
    assert "gloo" in str(stopped.value.__cause__)
    return str(stopped.value)


def test_end_of_another_process_is_named(corpus: Path, tmp_path: Path) -> None:
    config = tiny_experiment(corpus, tmp_path / "run")
    message, _ = run_ranks(2, leave_early, config)
    assert message.startswith("training stopped after step 0: the processes can no longer exchange")
    assert "The same command continues from the newest checkpoint ([" in message
    assert len(message.splitlines()) == 1
    log = (config.folder / "train.log").read_text()
    assert "training ended by TrainingStopped: training stopped after step 0" in log


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[/x/gloo/transport/tcp/pair.cc:537] Read error"), True),
        (torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0."), True),
        # Errors of the own process.
        (RuntimeError("[enforce fail at /x/gloo/transport/tcp/pair.cc:9] 8 vs 4"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (TrainingStopped("as another gloo/transport/ said"), False),
    ],
)
def test_errors_of_the_exchange(error: RuntimeError, expected: bool) -> None:
    assert is_of_exchange(error) == expected
