"""Runs the pieces of a prepare job in fresh processes, with a progress bar."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
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
) -> list[Result]:
    """`function` of every shard, in the order of `shards`; the first error is raised.

    Each shard has a process of its own that no other shard used before (the speech engine keeps
    state), so the results do not depend on `num_jobs`. `sizes`: utterances of each shard, for the
    progress bar. Processes are spawned: the calling script needs the `__main__` guard.
    """
    if num_jobs < 1:
        raise ValueError(f"num_jobs must be at least 1, got {num_jobs}")
    results: dict[int, Result] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        Progress(*columns, TimeElapsedColumn(), console=console) as progress,
        ProcessPoolExecutor(
            min(num_jobs, len(shards)) or 1,
            mp_context=multiprocessing.get_context("spawn"),
            max_tasks_per_child=1,
            initializer=torch.set_num_threads,
            # Processes share the cores already; threads on top of them only wait for one another.
            initargs=(1,),
        ) as pool,
    ):
        task = progress.add_task(description, total=sum(sizes))
        futures = {pool.submit(function, shard): index for index, shard in enumerate(shards)}
        try:
            for future in as_completed(futures):
                index = futures[future]
                results[index] = future.result()
                progress.advance(task, sizes[index])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [results[index] for index in range(len(shards))]
