"""Progress bars of the commands: shown on a terminal only, erased when the work is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, TaskID

Item = TypeVar("Item")


class ProgressBar:
    """A bar on a terminal, or nothing where there is none."""

    def __init__(self, progress: Progress | None, task: TaskID | None) -> None:
        self._progress = progress
        self._task = task

    def show(self, completed: float) -> None:
        """So much is done in all."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=completed)

    def over(self, items: Iterable[Item], size: Callable[[Item], float]) -> Iterator[Item]:
        """The items; each counts with its size when the next one is asked for.

        The bar is erased after the last one, so that results can be printed.
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
    """A bar with the time left, until the end of the context.

    Args:
        console: of the log, on stderr; None for no bar.
        description: of the work and its unit.
        total: when the work is done; None where that is not known.
    """
    if console is None or not console.is_terminal:
        yield ProgressBar(None, None)
        return
    from rich.progress import Progress

    # What goes to stdout stays there: it may be a file or another program.
    with Progress(
        *bar_columns(), console=console, transient=True, expand=True, redirect_stdout=False
    ) as progress:
        yield ProgressBar(progress, progress.add_task(description, total=total))


def bar_columns() -> list[ProgressColumn]:
    """Description, bar, how much of how much, time elapsed and left."""
    from rich import progress

    return [
        progress.TextColumn("[bold]{task.description}"),
        progress.BarColumn(bar_width=None),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
    ]
