"""Runs the shards of a prepare command in several processes, with a progress bar."""

from __future__ import annotations

import itertools
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# Fewer shards than this are done before worker processes have started.
_MIN_SHARDS_FOR_PROCESSES = 4

Shard = TypeVar("Shard")
Result = TypeVar("Result")


def stream_shards(
    function: Callable[[Shard], Result],
    shards: Iterable[Shard],
    *,
    size: Callable[[Shard], int],
    num_jobs: int,
    description: str,
    console: Console,
    total: int | None = None,
    fresh_processes: bool = False,
) -> Iterator[Result]:
    """Yields `function(shard)` for every shard, in order; only a few shards are in memory.

    A single job, and up to three shards, run in the calling process. Otherwise worker processes
    are started, so the calling script needs the `__main__` guard. The first error is raised.

    Args:
        size: number of utterances in a shard, for the progress bar.
        total: number of utterances in all shards, if known.
        fresh_processes: run each shard in a process of its own, for functions whose library keeps
            state between calls.
    """
    if num_jobs < 1:
        raise ValueError(f"num_jobs must be at least 1, got {num_jobs}")
    count = "{task.completed:,}" if total is None else "{task.completed:,} of {task.total:,}"
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn(count))
    times = (TimeElapsedColumn(), *(() if total is None else (TimeRemainingColumn(),)))
    with Progress(*columns, *times, console=console) as progress, ExitStack() as stack:
        task = progress.add_task(description, total=total)
        stream = iter(shards)
        first = list(itertools.islice(stream, _MIN_SHARDS_FOR_PROCESSES))
        in_caller = num_jobs == 1 or len(first) < _MIN_SHARDS_FOR_PROCESSES
        pool = None
        if fresh_processes or not in_caller:
            pool = _process_pool(num_jobs, fresh_processes, function.__module__)
            stack.enter_context(pool)
        pending: deque[tuple[int, Callable[[], Result], Callable[[], bool]]] = deque()
        try:
            for shard in itertools.chain(first, stream):
                if pool is None:
                    yield function(shard)
                    progress.advance(task, size(shard))
                    continue
                future = pool.submit(function, shard)
                pending.append((size(shard), future.result, future.cancel))
                if len(pending) >= 2 * num_jobs:
                    utterances, result, _ = pending.popleft()
                    yield result()
                    progress.advance(task, utterances)
            while pending:
                utterances, result, _ = pending.popleft()
                yield result()
                progress.advance(task, utterances)
        finally:
            for _, _, cancel in pending:
                cancel()


def _process_pool(num_jobs: int, fresh: bool, module: str) -> ProcessPoolExecutor:
    """Workers that have imported a module, once for all of them where the system can fork."""
    can_fork = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if can_fork else "spawn")
    context.set_forkserver_preload([module])
    return ProcessPoolExecutor(
        num_jobs,
        mp_context=context,
        max_tasks_per_child=1 if fresh else None,
        initializer=torch.set_num_threads,
        # The processes share the cores already; more threads would only compete for them.
        initargs=(1,),
    )
