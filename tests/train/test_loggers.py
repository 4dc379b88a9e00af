"""MLflow and Weights & Biases show a run's metrics; a continued run goes on in the same one there.

MLflow itself runs if it is installed, with its file store; a stand-in replaces Weights & Biases.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from matplotlib.figure import Figure

from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_FAILED, EXIT_USAGE
from pruned_rnnt.train.engine import log as log_module
from pruned_rnnt.train.engine import loggers as loggers_module
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.log import RunLog, read_metrics
from tests.tiny_corpus import tiny_overrides

SETTINGS = {"train": {"steps": 9, "loggers": ["mlflow"]}, "model": {"dim": 3}}


class Wandb(ModuleType):
    """Records what the logger does; `failing` makes each later call raise, `unreachable` init."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.exit_codes: list[int] = []
        self.failing = self.unreachable = False

    def init(self, **options: Any) -> Wandb:
        if self.unreachable:
            raise ConnectionError("server unreachable")
        self.started.append(options)
        return self

    def define_metric(self, name: str, step_metric: str = "") -> None:
        assert step_metric in ("", "step")

    def log(self, values: dict[str, Any]) -> None:
        if self.failing:
            raise ConnectionError("no route to host\nsecond line")
        self.logged.append(values)

    def finish(self, *, exit_code: int) -> None:
        self.exit_codes.append(exit_code)

    def Image(self, figure: Figure) -> str:
        assert isinstance(figure, Figure)
        return "image"

    def Html(self, text: str) -> str:
        return text


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def write(folder: Path, step: int, steps: range, *loggers: str) -> None:
    """Log the steps of a training that starts at `step`."""
    with RunLog(folder, step, loggers=loggers, settings=SETTINGS) as log:
        for each in steps:
            log.scalars("train", each, {"loss": float(each), "epoch": 0})
        log.figure("valid/lattice", steps[-1], Figure())
        log.text("valid/samples", steps[-1], "a < b")


def test_metrics_stay_if_they_cannot_be_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunLog(tmp_path, 0, loggers=[]) as log:
        log.scalars("train", 1, {"loss": 2.0})
    before = (tmp_path / "metrics.jsonl").read_text()

    def full(path: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"), RunLog(tmp_path, 1, loggers=[]):
        pass
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_wandb_continues_in_the_same_run(wandb: Wandb, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write(folder, 0, range(1, 4), "wandb")
    write(folder, 2, range(3, 5), "wandb")
    write(tmp_path / "other", 0, range(1, 2), "wandb")
    first, again, other = wandb.started
    assert first["id"] == again["id"] != other["id"]
    assert first["name"] == "run"
    assert first["resume"] == "allow"
    assert first["config"] == SETTINGS
    assert {"step": 4, "train/loss": 4.0, "train/epoch": 0} in wandb.logged
    assert {"step": 3, "valid/lattice": "image"} in wandb.logged
    assert {"step": 3, "valid/samples": "<pre>a &lt; b</pre>"} in wandb.logged
    assert wandb.exit_codes == [0, 0, 0]


def test_failed_run_is_marked(wandb: Wandb, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), RunLog(tmp_path, 0, loggers=["wandb"]):
        raise RuntimeError
    assert wandb.exit_codes == [1]


def test_failing_server_does_not_stop_training(
    wandb: Wandb, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wandb.failing = True
    write(tmp_path, 0, range(1, 4), "tensorboard", "wandb")
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("logging to wandb failed (no route to host) and is switched off")
    assert list((tmp_path / "tensorboard").iterdir())


def test_unreachable_server_stops_new_runs_alone(
    wandb: Wandb, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wandb.unreachable = True
    with pytest.raises(ValueError, match=r"train\.loggers has wandb, .*\(server unreachable\)"):
        write(tmp_path, 0, range(1, 4), "tensorboard", "wandb")
    write(tmp_path, 2, range(3, 4), "tensorboard", "wandb")
    assert [line["step"] for line in read_metrics(tmp_path)] == [3]
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("logging to wandb failed (server unreachable) and is switched off")


def test_a_logger_that_cannot_be_opened_closes_the_others(
    wandb: Wandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ConnectionError("server unreachable")

    monkeypatch.setattr(loggers_module, "_Mlflow", refuse)
    with pytest.raises(ValueError, match=r"train\.loggers has mlflow"):
        write(tmp_path, 0, range(1, 4), "wandb", "mlflow")
    assert wandb.exit_codes == [1]


def test_full_disk_names_the_file_and_closes_the_loggers(
    wandb: Wandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("the system has no /dev/full")
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    monkeypatch.setattr(log_module, "write_lines", lambda path, lines: None)
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics\.jsonl'"):
        write(tmp_path, 0, range(1, 4), "wandb")
    assert wandb.exit_codes == [1]


def test_other_processes_log_nothing(
    wandb: Wandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "open_loggers", lambda *_: pytest.fail("opened"))
    ranks = Ranks(rank=1, world_size=2)
    with RunLog(tmp_path / "run", 0, loggers=["wandb"], ranks=ranks) as log:
        log.scalars("valid", 1, {"wer": 0.5})
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_training_logs_to_the_programs_in_its_settings(
    wandb: Wandb, corpus: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = tiny_overrides(corpus, run, "train.loggers=[wandb]")
    assert main(["train", *settings]) == 0
    assert not (run / "tensorboard").exists()
    steps = [line["step"] for line in wandb.logged if "train/total_per_frame" in line]
    assert steps == [1, 2, 3, 4]
    assert any("valid/wer" in line for line in wandb.logged)
    assert any(line.get("valid/lattice") == "image" for line in wandb.logged)
    assert wandb.started[0]["config"]["train"]["steps"] == 4
    # A continued run may log to other programs.
    more = [*settings, "train.steps=5", "train.loggers=[tensorboard,wandb]", "--allow-changes"]
    assert main(["train", *more]) == 0
    assert wandb.logged[-1]["step"] == 5
    assert (run / "tensorboard").is_dir()
    assert json.loads((run / "loggers.json").read_text()) == {"wandb": wandb.started[0]["id"]}


def test_wrong_and_missing_loggers_are_one_line(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
        settings = tiny_overrides(corpus, tmp_path / "run", f"train.loggers=[{name}]")
        assert main(["train", *settings]) == EXIT_FAILED
        shown = capsys.readouterr().err.strip().splitlines()
        wanted = f"{name} is not installed: pip install 'pruned_rnnt[{name}]'"
        assert shown == [f"pruned-rnnt train: {wanted}"]
    assert main(["train", "train.loggers=[comet]"]) == EXIT_USAGE
    shown = capsys.readouterr().err
    assert "train.loggers has 'comet', needs some of tensorboard, mlflow, wandb" in shown
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs mlflow")
def test_mlflow_continues_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folder = tmp_path / "exp/run"
    write(folder, 0, range(1, 5), "mlflow")
    # Killed after step 4, and continued from a checkpoint of step 2.
    write(folder, 2, range(3, 7), "mlflow")
    client = MlflowClient(tracking_uri=(tmp_path / "exp/mlruns").as_uri())
    experiment = client.get_experiment_by_name("pruned_rnnt")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "run"
    assert run.info.status == "FINISHED"
    assert run.data.params["model.dim"] == "3"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(s, s) for s in range(1, 7)]
    names = [item.path for item in client.list_artifacts(run.info.run_id, "valid/lattice")]
    assert names == ["valid/lattice/00000004.png", "valid/lattice/00000006.png"]
    with pytest.raises(KeyboardInterrupt), RunLog(folder, 6, loggers=["mlflow"]):
        raise KeyboardInterrupt
    assert client.get_run(run.info.run_id).info.status == "FAILED"
