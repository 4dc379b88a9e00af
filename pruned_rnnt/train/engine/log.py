"""The logs of a run: log file, metrics.jsonl, TensorBoard and other programs, progress bar."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import IO, Any

import rich.progress
from rich.console import Console, RenderableType
from rich.text import Text

from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.system.console import bar_columns
from pruned_rnnt.system.json_file import with_nan, without_nan
from pruned_rnnt.system.whole_files import write_lines
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.loggers import MetricLogger, open_loggers, warn_switched_off
from pruned_rnnt.train.engine.report import StepReport, averages, progress_line, step_line

logger = logging.getLogger(__name__)

_OWN = "own"


class RunLog:
    """The log of a run while it trains; a context manager.

    The first process writes metrics.jsonl, shows metrics in other programs and a progress bar; the
    others only count their steps. If MLflow or Weights & Biases fail, for instance because a server
    is down, a warning is logged and the run goes on without them; at the start of a new run, it is
    an error.

    Args:
        folder: of the run.
        step: number of steps done. Later lines of metrics.jsonl and later TensorBoard events, which
            a killed run left, are dropped, as those steps are repeated.
        redo: groups whose lines of this step are dropped, too, as they are written again.
        loggers: names of programs, see `loggers`.
        settings: nested configuration of the run, for these programs.
        own: another logger, whose errors end the run.
        steps: of the whole run.
        console: shows the progress bar; None for no bar.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        redo: Collection[str] = (),
        *,
        loggers: Sequence[str] = ("tensorboard",),
        settings: Mapping[str, Any] | None = None,
        own: MetricLogger | None = None,
        ranks: Ranks | None = None,
        steps: int = 0,
        console: Console | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.steps = steps
        self._metrics: IO[str] | None = None
        self._loggers: dict[str, MetricLogger] = {}
        if self.ranks.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            metrics = RunFolder(folder).metrics
            kept = [
                line
                for line in read_metrics(folder)
                if line["step"] < step or (line["step"] == step and line["group"] not in redo)
            ]
            write_lines(metrics, map(_metrics_line, kept))
            self._metrics = metrics.open("a", encoding="utf-8")
            self._loggers = open_loggers(loggers, folder, step, settings or {})
            if own is not None:
                self._loggers[_OWN] = own
        self._progress = progress_bar(console if self.ranks.is_first else None)
        self._bar = self._progress.add_task("training", total=steps, completed=step, status="")
        self._restart()

    def _restart(self) -> None:
        """Begin new averages."""
        self._reports: list[StepReport] = []
        self._started = time.perf_counter()
        self._paused = 0.0

    def add(self, report: StepReport) -> None:
        """Count a step; the averages leave skipped steps out."""
        self._progress.advance(self._bar)
        if not report.problem:
            self._reports.append(report)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the context (a validation) from the speeds."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - started

    def averages(self) -> dict[str, float]:
        """The `report.averages` of the steps since the last call; all processes must call."""
        elapsed = max(time.perf_counter() - self._started - self._paused, 1e-9)
        values = averages(self._reports, elapsed, self.ranks)
        self._restart()
        return values

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log averages and further values of the training steps up to `step`."""
        self.scalars("train", step, values)
        status = progress_line(values)
        self._progress.update(self._bar, status=status)
        short = step_line(step, self.steps, values)
        log_info(logger, short, f"step {step}/{self.steps} {status}")

    def scalars(self, group: str, step: int, values: Mapping[str, float]) -> None:
        """Write one line of metrics.jsonl, and show each value as `group/name`."""
        if self._metrics is not None:
            line = _metrics_line({"group": group, "step": step, **values})
            try:
                self._metrics.write(line + "\n")
                self._metrics.flush()
            except OSError as error:  # such as a full disk, which does not name the file
                raise OSError(error.errno, error.strerror, self._metrics.name) from error
        self._in_each(lambda each: each.scalars(group, step, values))

    @property
    def shows_figures(self) -> bool:
        """Whether any program takes them."""
        return bool(self._loggers)

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
                if name in ("tensorboard", _OWN):
                    raise
                # Clients of servers have error types of their own.
                del self._loggers[name]
                warn_switched_off(name, error)

    def __enter__(self) -> RunLog:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._progress.stop()
        try:
            self._in_each(lambda each: each.close(failed=kind is not None))
        finally:
            if self._metrics is not None:
                try:
                    self._metrics.close()
                except OSError:
                    # Closing writes a failed line again; the first error is the one to show.
                    if kind is None:
                        raise


class _FullLines(logging.Formatter):
    """Formats the long form of messages that have one."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = getattr(record, "full_line", record.message)
        return super().formatMessage(record)


def log_info(logger: logging.Logger, short: str, full: str) -> None:
    """Log `short`, which fits a piped log of 80 columns; train.log gets `full` instead."""
    logger.info("%s", short, extra={"full_line": full})


class EarlyWarnings(MemoryHandler):
    """Keeps the warnings logged inside its context, which may be entered several times, until the
    run's log file is opened."""

    def __init__(self) -> None:
        super().__init__(sys.maxsize, flushLevel=sys.maxsize)
        self.setLevel(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        kept = copy(record)
        try:
            # Arguments may be errors, whose frames hold a whole checkpoint.
            kept.msg, kept.args, kept.exc_info = record.getMessage(), None, None
        except Exception:  # wrong arguments of a call, as other handlers take them
            self.handleError(record)
            return
        super().emit(kept)

    def __enter__(self) -> EarlyWarnings:
        logging.getLogger("pruned_rnnt").addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        logging.getLogger("pruned_rnnt").removeHandler(self)


@contextmanager
def log_file(folder: Path, rank: int, early: EarlyWarnings | None = None) -> Iterator[None]:
    """Also write log lines to a file in a run's folder, and the error that ends the run, if any.

    The first process writes `train.log`; the others write warnings to files of their own, which are
    created with the first warning. Those of `early` come first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = RunFolder(folder).log
    path = log if rank == 0 else log.with_name(f"{log.stem}-rank-{rank}{log.suffix}")
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(_FullLines("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger = logging.getLogger("pruned_rnnt")
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    try:
        if early is not None:
            early.setTarget(handler)
            early.flush()
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
    """Lines of a run's metrics.jsonl without damaged ones (after a kill or on a full disk).

    A value that is null, which stands for NaN and infinity, is NaN.
    """
    path = RunFolder(folder).metrics
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            line = with_nan(line)
            if _are_metrics(line):
                lines.append(line)
    return lines


def _metrics_line(values: dict[str, Any]) -> str:
    """A line of metrics.jsonl. JSON has no NaN and infinity, so they are null."""
    return json.dumps(without_nan(values))


def _are_metrics(line: Mapping[str, Any]) -> bool:
    numbers = [value for name, value in line.items() if name != "group"]
    return isinstance(line.get("group"), str) and all(isinstance(v, int | float) for v in numbers)


class _BarAndStatus(rich.progress.Progress):
    """Shows the `status` fields of tasks below the bars, as one line has no room for both."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            yield Text(task.fields["status"])


def progress_bar(console: Console | None) -> rich.progress.Progress:
    """Steps done, time left, and a `status` field; shown on a terminal only."""
    return _BarAndStatus(
        *bar_columns(),
        console=console,
        expand=True,
        disable=console is None or not console.is_terminal,
    )
