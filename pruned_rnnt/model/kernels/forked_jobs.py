"""Jobs in copies of this process, for work that holds Python's lock.

    jobs  0 1 2 3 4 5 ...    a pipe with their numbers: each process reads the next one
    process A   [ 0 ][ 3  ] ...
    process B   [ 1   ][ 4 ] ...     a byte in another pipe after each job
    process C   [ 2 ][ 5 ] ...

A fork copies only the thread that calls it. A job must therefore not need what another thread may
hold at that moment, and must not use the GPU. A copy that waits for such a lock for ever is killed.
"""

from __future__ import annotations

import os
import select
import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress

_NUMBER_BYTES = 2
# What a pipe holds on all systems, 4 KiB, has more numbers than a model has kernels.
_MOST_JOBS = 2048
# If no job ends in this time, the processes are stuck.
_MOST_SECONDS = 60.0


def run_forked(
    jobs: Sequence[Callable[[], object]], processes: int, show: Callable[[int], None]
) -> None:
    """Run jobs in forked processes, and wait for these.

    Results and errors of the jobs are lost: they leave files. Some jobs may not have run, if
    processes cannot be forked, die, or are stuck.

    Args:
        processes: how many, at most.
        show: called with the number of jobs that have ended.
    """
    jobs = jobs[:_MOST_JOBS]
    numbers = _pipe_of_numbers(len(jobs))
    ended, ends = os.pipe()
    children = []
    try:
        with suppress(OSError):
            for _ in range(min(processes, len(jobs))):
                children.append(_fork(jobs, numbers, ends))
        os.close(ends)
        _watch(ended, show)
    finally:
        for each in (numbers, ended):
            os.close(each)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _pipe_of_numbers(count: int) -> int:
    """The end to read of a pipe with the numbers below `count`."""
    numbers, into = os.pipe()
    os.write(into, b"".join(each.to_bytes(_NUMBER_BYTES, "big") for each in range(count)))
    os.close(into)
    return numbers


def _fork(jobs: Sequence[Callable[[], object]], numbers: int, ends: int) -> int:
    """The number of a new process, which runs jobs and then exits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside other threads
        child = os.fork()
    if child:
        return child
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while number := os.read(numbers, _NUMBER_BYTES):
            with suppress(Exception):
                jobs[int.from_bytes(number, "big")]()
            os.write(ends, b".")  # fails if the parent has died
    finally:
        os._exit(0)


def _watch(ended: int, show: Callable[[int], None]) -> None:
    """Wait until no process has the other end of the pipe, or nothing comes for long."""
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    count = 0
    while poll.poll(1000 * _MOST_SECONDS):
        found = os.read(ended, _MOST_JOBS)
        if not found:
            return
        count += len(found)
        show(count)
