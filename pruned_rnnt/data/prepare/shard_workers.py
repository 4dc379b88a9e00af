"""Runs the pieces of a prepare job in several processes, with a progress bar."""

from __future__ import annotations

import itertools
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_SHARDS_WORTH_PROCESSES = 4

Shard = TypeVar("Shard")
Result = TypeVar("Result")


def run_shards(
    function: Callable[[Shard], Result],
    shards: Sequence[Shard],
    *,
    sizes: Sequence[int],
    num_jobs: int,
    description: str,
    console: Console,
    fresh_processes: bool = False,
) -> list[Result]:
    """`function` of every shard, in the order of `shards`; the first error is raised.

    sizes: utterances of each shard, for the progress bar. fresh_processes: give each shard a
    process that no other shard used before, for functions whose library keeps state; otherwise
    one job runs in the calling process. Processes are spawned: the calling script needs the
    `__main__` guard.
    """
    if num_jobs < 1:
        raise ValueError(f"num_jobs must be at least 1, got {num_jobs}")
    run = _in_processes if fresh_processes or num_jobs > 1 else _here
    results: dict[int, Result] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(description, total=sum(sizes))
        for index, result in run(function, shards, num_jobs, fresh_processes):
            results[index] = result
            progress.advance(task, sizes[index])
    return [results[index] for index in range(len(shards))]


def stream_shards(
    function: Callable[[Shard], Result],
    shards: Iterable[Shard],
    *,
    size: Callable[[Shard], int],
    num_jobs: int,
    description: str,
    console: Console,
    total: int | None = None,
) -> Iterator[Result]:
    """`function` of every shard in order, for shards too many to hold: few are made in advance.

    size, total: utterances of a shard, and of all where known, for the progress bar. One job, and
    up to three shards, which are done before processes have started, run in the calling process;
    otherwise processes are spawned. The first error is raised.
    """
    if num_jobs < 1:
        raise ValueError(f"num_jobs must be at least 1, got {num_jobs}")
    count = "{task.completed:,}" if total is None else "{task.completed:,} of {task.total:,}"
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn(count))
    times = (TimeElapsedColumn(), *(() if total is None else (TimeRemainingColumn(),)))
    with Progress(*columns, *times, console=console) as progress, ExitStack() as stack:
        task = progress.add_task(description, total=total)
        stream = iter(shards)
        first = list(itertools.islice(stream, _SHARDS_WORTH_PROCESSES))
        here = num_jobs == 1 or len(first) < _SHARDS_WORTH_PROCESSES
        pool = None if here else stack.enter_context(_pool(num_jobs))
        waiting: deque[tuple[int, Callable[[], Result], Callable[[], bool]]] = deque()
        try:
            for shard in itertools.chain(first, stream):
                if pool is None:
                    yield function(shard)
                    progress.advance(task, size(shard))
                    continue
                future = pool.submit(function, shard)
                waiting.append((size(shard), future.result, future.cancel))
                if len(waiting) >= 2 * num_jobs:
                    done, result, _ = waiting.popleft()
                    yield result()
                    progress.advance(task, done)
            while waiting:
                done, result, _ = waiting.popleft()
                yield result()
                progress.advance(task, done)
        finally:
            for _, _, cancel in waiting:
                cancel()


def _pool(num_jobs: int, fresh: bool = False) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        num_jobs,
        mp_context=multiprocessing.get_context("spawn"),
        max_tasks_per_child=1 if fresh else None,
        initializer=torch.set_num_threads,
        # Processes share the cores already; threads on top of them only wait for one another.
        initargs=(1,),
    )


def _here(
    function: Callable[[Shard], Result], shards: Sequence[Shard], num_jobs: int, fresh: bool
) -> Iterator[tuple[int, Result]]:
    for index, shard in enumerate(shards):
        yield index, function(shard)


def _in_processes(
    function: Callable[[Shard], Result], shards: Sequence[Shard], num_jobs: int, fresh: bool
) -> Iterator[tuple[int, Result]]:
    with _pool(max(1, min(num_jobs, len(shards))), fresh) as pool:
        futures = {pool.submit(function, shard): index for index, shard in enumerate(shards)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
