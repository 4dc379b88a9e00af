"""The console of the commands: log lines and progress bars on stderr."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, TextIO, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, TaskID

# Identifies the handler, so that a second call of `main` replaces it.
_HANDLER_NAME = "pruned-rnnt console"
Item = TypeVar("Item")


class _PipedFormatter(logging.Formatter):
    """Time and message, and the level above INFO; of 80 columns, 71 are left for the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno > logging.INFO:
            record.message = f"{record.levelname} {record.message}"
        return super().formatMessage(record)


def start_logging() -> Console:
    """Send log lines to the console that also draws the progress bar; returns the console.

    Unless someone has replaced `sys.stderr`, it becomes a stream with a descriptor of its own. The
    handler belongs to the root logger. Without one, other packages that log (lhotse) would add
    their own to it, and each of our lines would be printed twice.
    """
    from rich.console import Console
    from rich.logging import RichHandler

    # Readers of audio redirect descriptor 2 for moments, in which other threads may log or print.
    if getattr(sys.stderr, "name", "") == "<stderr>":
        sys.stderr = _own_stderr() or sys.stderr
    console = Console(stderr=True)
    handler: logging.Handler = logging.StreamHandler()
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, omit_repeated_times=False)
    else:
        handler.setFormatter(_PipedFormatter())
    handler.set_name(_HANDLER_NAME)
    root = logging.getLogger()
    root.handlers = [h for h in root.handlers if h.get_name() != _HANDLER_NAME] + [handler]
    logging.getLogger("pruned_rnnt").setLevel(logging.INFO)
    return console


@cache
def _own_stderr() -> TextIO | None:
    """Standard error through a descriptor of its own; None if it is closed."""
    try:
        number = os.dup(2)
    except OSError:
        return None
    encoding, errors = sys.stderr.encoding, sys.stderr.errors
    return os.fdopen(number, "w", buffering=1, encoding=encoding, errors=errors)


@contextmanager
def naming_stdout() -> Iterator[None]:
    """Errors of writing to standard output name it, as those of files do."""
    try:
        yield
    except OSError as error:
        error.filename = "standard output"
        raise


class ProgressBar:
    """A progress bar; without a terminal it does nothing."""

    def __init__(self, progress: Progress | None, task: TaskID | None) -> None:
        self._progress = progress
        self._task = task

    def show(self, completed: float) -> None:
        """Set the amount of work that is done; whole units are shown."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=int(completed))

    def over(self, items: Iterable[Item], size: Callable[[Item], float]) -> Iterator[Item]:
        """Yield the items and advance the bar by the size of each.

        The bar is erased after the last item, so that results can be printed.
        """
        done = 0.0
        for item in items:
            yield item
            done += size(item)
            self.show(done)
        if self._progress is not None:
            self._progress.stop()


@contextmanager
def progress_bar(
    console: Console | None, description: str, total: float | None
) -> Iterator[ProgressBar]:
    """Show a bar with the time left until the end of the context.

    Args:
        console: of the log, on stderr; None for no bar.
        description: of the work and its unit.
        total: amount of work, None if unknown.
    """
    if console is None or not console.is_terminal:
        yield ProgressBar(None, None)
        return
    from rich.progress import Progress

    # stdout is not redirected: it may be a file or a pipe.
    with Progress(
        *bar_columns(), console=console, transient=True, expand=True, redirect_stdout=False
    ) as progress:
        yield ProgressBar(progress, progress.add_task(description, total=total))


def bar_columns() -> list[ProgressColumn]:
    """Description, bar, completed and total amount, time elapsed and left."""
    from rich import progress

    return [
        progress.TextColumn("[bold]{task.description}"),
        progress.BarColumn(bar_width=None),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
    ]
