"""Programs that show the metrics of a run: TensorBoard, MLflow, Weights & Biases.

RUN/tensorboard/      events of TensorBoard
RUN/loggers.json      ids of the run in MLflow and Weights & Biases, with which it is continued

Only the first process logs. MLflow writes to MLFLOW_TRACKING_URI, or without that to the folder
`mlruns` beside the run; Weights & Biases to the account that `wandb login` chose, or with
WANDB_MODE=offline to RUN/wandb.
"""

from __future__ import annotations

import html
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from pruned_rnnt.config.files import leaves
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.system.json_file import read_json
from pruned_rnnt.system.optional_packages import require
from pruned_rnnt.system.whole_files import write_lines

LOGGERS = ("tensorboard", "mlflow", "wandb")
_PROJECT = "pruned_rnnt"
logger = logging.getLogger(__name__)
# MLflow takes this many parameters in a request.
_MAX_PARAMETERS = 100


class MetricLogger(Protocol):
    """Shows the metrics of one run."""

    def scalars(self, group: str, step: int, values: Mapping[str, float]) -> None:
        """Show each value as `group/name`."""

    def figure(self, name: str, step: int, figure: Any) -> None:
        """Show a matplotlib figure; the caller closes it."""

    def text(self, name: str, step: int, text: str) -> None:
        """Show Markdown text."""

    def close(self, *, failed: bool) -> None:
        """End the logging; failed: by an error."""


def require_loggers(names: Sequence[str]) -> None:
    """Raise MissingPackageError if the package of a logger is not installed."""
    require(*(name for name in names if name != "tensorboard"))


def open_loggers(
    names: Sequence[str], folder: Path, step: int, settings: Mapping[str, Any]
) -> dict[str, MetricLogger]:
    """The loggers by name; of a continued run, without those of servers that cannot be reached.

    Args:
        folder: of the run.
        step: number of steps done.
        settings: nested configuration, to be shown.

    Raises:
        ValueError: one of a new run cannot be opened; the message names it.
    """
    makers: dict[str, Callable[..., MetricLogger]] = {
        "tensorboard": _TensorBoard,
        "mlflow": _Mlflow,
        "wandb": _Wandb,
    }
    opened: dict[str, MetricLogger] = {}
    for name in names:
        try:
            opened[name] = makers[name](folder, step, settings)
        except Exception as error:
            if name == "tensorboard" or isinstance(error, ImportError):
                raise
            if step == 0:
                for each in opened.values():
                    with suppress(Exception):  # a server of this one may fail, too
                        each.close(failed=True)
                raise ValueError(
                    f"train.loggers has {name}, which could not be opened ({_reason(error)}): "
                    "correct that, or leave it out"
                ) from error
            # A run that is continued at night must not wait for a server.
            warn_switched_off(name, error)
    return opened


def warn_switched_off(name: str, error: Exception) -> None:
    logger.warning(
        "logging to %s failed (%s) and is switched off until the run is continued; metrics.jsonl "
        "has all values",
        name,
        _reason(error),
    )


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


class _TensorBoard:
    """Drops the events of later steps, which a killed run left, as those steps are repeated."""

    def __init__(self, folder: Path, step: int, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(RunFolder(folder).tensorboard, purge_step=step + 1)

    def scalars(self, group: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._board.add_scalar(f"{group}/{name}", value, step)

    def figure(self, name: str, step: int, figure: Any) -> None:
        self._board.add_figure(name, figure, step, close=False)

    def text(self, name: str, step: int, text: str) -> None:
        self._board.add_text(name, text, step)

    def close(self, *, failed: bool) -> None:
        self._board.close()


class _Mlflow:
    """Skips steps that the MLflow run already has, because a continued run repeats them."""

    def __init__(self, folder: Path, step: int, settings: Mapping[str, Any]) -> None:
        import mlflow

        uri = os.environ.get("MLFLOW_TRACKING_URI") or (folder.resolve().parent / "mlruns").as_uri()
        if uri.startswith("file:"):
            # A folder needs no server; MLflow 3 asks for this consent to its older file format.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._run = _read_ids(folder).get("mlflow") or self._create(folder, settings)
        self._client.update_run(self._run, status="RUNNING")
        self._newest: dict[str, int] = {}

    def _create(self, folder: Path, settings: Mapping[str, Any]) -> str:
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        identity = experiment.experiment_id if experiment else self._client.create_experiment(name)
        run = self._client.create_run(identity, run_name=folder.resolve().name)
        parameters = [Param(key, str(value)) for key, value in leaves(settings).items()]
        for begin in range(0, len(parameters), _MAX_PARAMETERS):
            chunk = parameters[begin : begin + _MAX_PARAMETERS]
            self._client.log_batch(run.info.run_id, params=chunk)
        _write_id(folder, "mlflow", run.info.run_id)
        return str(run.info.run_id)

    def scalars(self, group: str, step: int, values: Mapping[str, float]) -> None:
        if not values or step <= self._newest_step(f"{group}/{next(iter(values))}", group):
            return
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(f"{group}/{name}", float(v), now, step) for name, v in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def _newest_step(self, key: str, group: str) -> int:
        """The newest step of a group that the run had when this training started."""
        if group not in self._newest:
            history = self._client.get_metric_history(self._run, key)
            self._newest[group] = max((metric.step for metric in history), default=-1)
        return self._newest[group]

    def figure(self, name: str, step: int, figure: Any) -> None:
        self._client.log_figure(self._run, figure, f"{name}/{step:08d}.png")

    def text(self, name: str, step: int, text: str) -> None:
        self._client.log_text(self._run, text, f"{name}/{step:08d}.md")

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


class _Wandb:
    """A continued training run logs to the same run; repeated steps are shown twice."""

    def __init__(self, folder: Path, step: int, settings: Mapping[str, Any]) -> None:
        import wandb

        self._wandb = wandb
        identity = _read_ids(folder).get("wandb")
        if identity is None:
            identity = secrets.token_hex(4)
            _write_id(folder, "wandb", identity)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=folder.resolve().name,
            id=identity,
            resume="allow",
            dir=str(folder),
            config=dict(settings),
        )
        # Weights & Biases' own step must increase with every call, and steps repeat after a resume.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def scalars(self, group: str, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **{f"{group}/{name}": v for name, v in values.items()}})

    def figure(self, name: str, step: int, figure: Any) -> None:
        self._run.log({"step": step, name: self._wandb.Image(figure)})

    def text(self, name: str, step: int, text: str) -> None:
        page = self._wandb.Html(f"<pre>{html.escape(text)}</pre>")
        self._run.log({"step": step, name: page})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


def _read_ids(folder: Path) -> dict[str, str]:
    path = RunFolder(folder).loggers
    if not path.is_file():
        return {}
    return read_json(path, f"correct it, or remove it to log to new runs of {LOGGERS[1:]}")


def _write_id(folder: Path, name: str, identity: str) -> None:
    write_lines(RunFolder(folder).loggers, [json.dumps({**_read_ids(folder), name: identity})])
