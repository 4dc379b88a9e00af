"""The logs of a run: log file, metrics.jsonl, TensorBoard and other programs, progress bar."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rich.progress
from rich.console import Console, RenderableType
from rich.text import Text

from pruned_rnnt.system.progress import bar_columns
from pruned_rnnt.train.engine.loggers import MetricLogger, open_loggers

logger = logging.getLogger(__name__)

METRICS_NAME = "metrics.jsonl"
LOG_NAME = "train.log"
# Suffix of the names of measures, whose means over utterances are logged.
PER_UTTERANCE = "_per_utterance"


class RunLog:
    """Writes metrics.jsonl and shows metrics in other programs; a context manager.

    If MLflow or Weights & Biases fail, for instance because a server is down, a warning is logged
    and the run goes on without them.

    Args:
        folder: of the run.
        step: number of steps done. Later lines of metrics.jsonl and later TensorBoard events, which
            a killed run left, are dropped, as those steps are repeated.
        redo: groups whose lines of this step are dropped, too, as they are written again.
        loggers: names of programs, see `loggers`.
        settings: nested configuration of the run, for these programs.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        redo: Collection[str] = (),
        *,
        loggers: Sequence[str] = ("tensorboard",),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        metrics = folder / METRICS_NAME
        kept = [
            line
            for line in read_metrics(folder)
            if line["step"] < step or (line["step"] == step and line["group"] not in redo)
        ]
        metrics.write_text("".join(json.dumps(line) + "\n" for line in kept))
        self._metrics = metrics.open("a", encoding="utf-8")
        opened = open_loggers(loggers, folder, step, settings or {})
        self._loggers = dict(zip(loggers, opened, strict=True))

    def scalars(self, group: str, step: int, values: Mapping[str, float]) -> None:
        """Write one line of metrics.jsonl, and show each value as `group/name`."""
        self._metrics.write(json.dumps({"group": group, "step": step, **values}) + "\n")
        self._metrics.flush()
        self._in_each(lambda each: each.scalars(group, step, values))

    def figure(self, name: str, step: int, figure: Any) -> None:
        """Show a matplotlib figure, and close it."""
        from matplotlib import pyplot

        self._in_each(lambda each: each.figure(name, step, figure))
        pyplot.close(figure)

    def text(self, name: str, step: int, text: str) -> None:
        """Show Markdown text."""
        self._in_each(lambda each: each.text(name, step, text))

    def _in_each(self, call: Callable[[MetricLogger], None]) -> None:
        for name, each in list(self._loggers.items()):
            try:
                call(each)
            except Exception as error:
                if name == "tensorboard":
                    raise
                # Clients of servers have error types of their own.
                del self._loggers[name]
                reason = (str(error) or type(error).__name__).splitlines()[0]
                logger.warning(
                    "logging to %s failed (%s) and is switched off until the run is continued; %s "
                    "has all values",
                    name,
                    reason,
                    METRICS_NAME,
                )

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._metrics.close()
        self._in_each(lambda each: each.close(failed=kind is not None))


class _FullLines(logging.Formatter):
    """Formats the long form of messages that have one."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = getattr(record, "full_line", record.message)
        return super().formatMessage(record)


def log_info(logger: logging.Logger, short: str, full: str) -> None:
    """Log `short`, which fits a piped log of 80 columns; train.log gets `full` instead."""
    logger.info("%s", short, extra={"full_line": full})


@contextmanager
def log_file(folder: Path, rank: int) -> Iterator[None]:
    """Also write log lines to a file in a run's folder, and the error that ends the run, if any.

    The first process writes `train.log`; the others write warnings to files of their own, which are
    created with the first warning.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = LOG_NAME if rank == 0 else f"train-rank-{rank}.log"
    handler = logging.FileHandler(folder / name, encoding="utf-8", delay=True)
    handler.setFormatter(_FullLines("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger = logging.getLogger("pruned_rnnt")
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    try:
        yield
    except BaseException as error:
        # To the file alone: the caller that catches the error prints it on the console.
        text = f"training ended by {type(error).__name__}: {error}"
        handler.handle(logging.LogRecord("", logging.ERROR, "", 0, text, None, sys.exc_info()))
        raise
    finally:
        logger.removeHandler(handler)
        handler.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Lines of a run's metrics.jsonl without damaged ones (after a kill or on a full disk)."""
    path = folder / METRICS_NAME
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int) and _are_metrics(line):
            lines.append(line)
    return lines


def _are_metrics(line: Mapping[str, Any]) -> bool:
    numbers = [value for name, value in line.items() if name != "group"]
    return isinstance(line.get("group"), str) and all(isinstance(v, int | float) for v in numbers)


def step_line(step: int, steps: int, values: Mapping[str, float]) -> str:
    """Loss, learning rate, speed and time left, for a log of 80 columns."""
    parts = [f"step {step}/{steps}"]
    if "total_per_frame" in values:
        parts.append(f"loss {values['total_per_frame']:.4f}")
    parts.append(f"lr {values['learning_rate']:.1e}")
    parts.append(f"{values['steps_per_second']:.3g} steps/s")
    parts.append(f"{_time_left(steps - step, values['steps_per_second'])} left")
    if values["bad_steps"]:
        parts.append(f"{int(values['bad_steps'])} skipped")
    return " ".join(parts)


def _time_left(steps: int, steps_per_second: float) -> str:
    """Time for the steps, validations not counted: h:mm:ss, or days and hours."""
    if steps_per_second <= 0:
        return "?"
    minutes, seconds = divmod(round(steps / steps_per_second), 60)
    hours, minutes = divmod(minutes, 60)
    days, rest = divmod(hours, 24)
    return f"{days}d {rest}h" if days >= 2 else f"{hours}:{minutes:02d}:{seconds:02d}"


def progress_line(values: Mapping[str, float]) -> str:
    """All values of the group `train`, for the progress bar and train.log."""
    parts = [f"epoch {int(values['epoch'])}"]
    losses = _ending_in("_per_frame", values)
    if "total" in losses:
        parts.append(f"loss {losses.pop('total'):.4f}")
    if losses:
        parts.append("(" + ", ".join(f"{name} {value:.4f}" for name, value in losses.items()) + ")")
    parts += [f"{name} {v:.3f}" for name, v in _ending_in(PER_UTTERANCE, values).items()]
    parts.append(f"lr {values['learning_rate']:.2e}")
    parts.append(f"{values['steps_per_second']:.2f} steps/s")
    parts.append(f"{values['utterances_per_second']:.1f} utt/s")
    parts.append(f"{values['audio_hours_per_second']:.3f} h/s")
    if "gpu_memory_gib" in values:
        parts.append(f"GPU {values['gpu_memory_gib']:.1f} GiB")
    if values["bad_steps"]:
        parts.append(f"{int(values['bad_steps'])} skipped")
    return " ".join(parts)


def _ending_in(suffix: str, values: Mapping[str, float]) -> dict[str, float]:
    """The values whose names have this suffix, by the names without it."""
    return {name.removesuffix(suffix): v for name, v in values.items() if name.endswith(suffix)}


class _BarAndStatus(rich.progress.Progress):
    """Shows the `status` fields of tasks below the bars, as one line has no room for both."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            yield Text(task.fields["status"])


def progress_bar(console: Console, *, enabled: bool) -> rich.progress.Progress:
    """Steps done, time left, and a `status` field; shown on a terminal only."""
    return _BarAndStatus(
        *bar_columns(),
        console=console,
        expand=True,
        disable=not (enabled and console.is_terminal),
    )
