"""Jobs in copies of this process, for work that holds Python's global lock.

    jobs  0 1 2 3 4 5 ...    a pipe with their numbers: each process reads the next one
    process A   [ 0 ][ 3  ] ...
    process B   [ 1   ][ 4 ] ...     a byte in another pipe after each job
    process C   [ 2 ][ 5 ] ...

A fork copies only the thread that calls it. A job must therefore not need what another thread may
hold at that moment, and must not use the GPU. A copy that waits for such a lock is killed after a
minute, by its own alarm even if this process has ended.
"""

from __future__ import annotations

import io
import logging
import os
import select
import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

logger = logging.getLogger(__name__)

_NUMBER_BYTES = 2
# Their numbers fill 4 KiB, which every pipe holds; no model has so many kernels.
_MOST_JOBS = 2048
# A job that takes longer is stuck.
_MOST_SECONDS = 60


def run_forked(
    jobs: Sequence[Callable[[], object]], processes: int, show: Callable[[int], None]
) -> None:
    """Run jobs in forked processes, and wait until these have ended.

    Results and errors of the jobs are lost: they leave files. Some jobs may not have run, if
    processes cannot be forked, die, or are stuck.

    Args:
        processes: how many, at most.
        show: called with the number of jobs that have ended.
    """
    jobs = jobs[:_MOST_JOBS]
    children: list[int] = []
    with ExitStack() as stack, suppress(OSError):
        numbers, into = _pipe(stack)
        ended, ends = _pipe(stack)
        into.write(b"".join(n.to_bytes(_NUMBER_BYTES, "big") for n in range(len(jobs))))
        into.close()
        stack.callback(_kill, children)
        with suppress(OSError):
            for _ in range(min(processes, len(jobs))):
                children.append(_fork(jobs, numbers, ended, ends))
        ends.close()
        _watch(ended, show)


def _pipe(stack: ExitStack) -> tuple[io.FileIO, io.FileIO]:
    """The ends of a pipe, to read and to write."""
    begin, end = os.pipe()
    return stack.enter_context(io.FileIO(begin)), stack.enter_context(io.FileIO(end, "w"))


def _fork(
    jobs: Sequence[Callable[[], object]], numbers: io.FileIO, ended: io.FileIO, ends: io.FileIO
) -> int:
    """The id of a new process, which runs jobs and then exits."""
    parent = os.getpid()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside other threads
            child = os.fork()
        if child:
            return child
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for each in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(each, signal.SIG_DFL)
        ended.close()  # so that writing fails if the parent has died
        while number := numbers.read(_NUMBER_BYTES):
            signal.alarm(_MOST_SECONDS)
            with suppress(Exception):
                jobs[int.from_bytes(number, "big")]()
            ends.write(b".")
        os._exit(0)
    finally:
        # Also after an error, or a Ctrl-C right behind the fork.
        if os.getpid() != parent:
            os._exit(0)


def _watch(ended: io.FileIO, show: Callable[[int], None]) -> None:
    """Wait until no process has the other end of the pipe, or nothing comes for long."""
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    count = 0
    while poll.poll(1000 * _MOST_SECONDS):
        found = ended.read(_MOST_JOBS)
        if not found:
            return
        count += len(found)
        show(count)
    logger.warning("processes that should compile kernels are stuck, and are killed")


def _kill(children: list[int]) -> None:
    for child in children:
        # The system, or another part of the program, may have reaped it.
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
