"""Runs the pieces of a prepare job in several processes, with a progress bar."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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


def _here(
    function: Callable[[Shard], Result], shards: Sequence[Shard], num_jobs: int, fresh: bool
) -> Iterator[tuple[int, Result]]:
    for index, shard in enumerate(shards):
        yield index, function(shard)


def _in_processes(
    function: Callable[[Shard], Result], shards: Sequence[Shard], num_jobs: int, fresh: bool
) -> Iterator[tuple[int, Result]]:
    with ProcessPoolExecutor(
        max(1, min(num_jobs, len(shards))),
        mp_context=multiprocessing.get_context("spawn"),
        max_tasks_per_child=1 if fresh else None,
        initializer=torch.set_num_threads,
        # Processes share the cores already; threads on top of them only wait for one another.
        initargs=(1,),
    ) as pool:
        futures = {pool.submit(function, shard): index for index, shard in enumerate(shards)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
