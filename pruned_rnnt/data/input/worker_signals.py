"""Signal handling for the worker processes that load data.

Schedulers, and Ctrl-C, often send a signal to every process of a job. The training process then
finishes its step and saves, for which it needs its workers. So workers ignore these signals, and
end only when the training process ends them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any


class WorkerDiedError(ChildProcessError):
    """A worker process died before it returned its batch; the message has its process id."""


@contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Blocks SIGTERM in this thread, and in all threads of workers that are started inside.

    A worker may have threads before `ignore_job_signals` runs in it (BLAS threads, if the child of
    a fork server imports numpy), and SIGTERM would reach a thread that does not block it.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    if multiprocessing.get_start_method() != "fork":
        # The resource tracker unblocks SIGTERM when it starts, so start it before.
        resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_job_signals(_: int) -> None:
    """For DataLoader(worker_init_fn=...): accepts SIGTERM from the parent only, ignores the others.

    Start the workers inside `sigterm_blocked`. On systems that do not report the sender of a signal
    (other than Linux), any SIGTERM ends the worker.
    """
    for name in ("SIGINT", "SIGHUP", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(signal.Signals[name], signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):
        return
    # Threads that start later inherit this mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    # With a fork server, getppid returns the server instead of the training process.
    parent = multiprocessing.parent_process()
    pid = os.getppid() if parent is None else parent.pid
    threading.Thread(target=_end_with_the_parent, args=(pid,), daemon=True).start()


def _end_with_the_parent(parent: int | None) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


class WorkersDoneEvent:
    """Replaces the event by which torch's DataLoader ends its workers, in the training process.

    Every worker reads this event under a lock. One that is killed meanwhile never releases it, and
    torch then waits for the lock without limit, also while it reports the death.

    Args:
        event: torch's event, which the workers keep.
    """

    def __init__(self, event: Any) -> None:
        self._event = event
        self._is_set = False

    def is_set(self) -> bool:
        # Only the training process sets the event, so it needs no lock to know its state.
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        # A live worker holds the lock for microseconds; after a second its holder must be dead.
        # Any process may release a lock of multiprocessing.
        self._event._cond.acquire(timeout=1.0)
        self._event._cond.release()
        self._event.set()


@contextmanager
def worker_deaths_named() -> Iterator[None]:
    """Raises WorkerDiedError in place of the error of torch's DataLoader about a dead worker."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        raise WorkerDiedError(str(error).strip()) from error


@contextmanager
def worker_deaths_deferred() -> Iterator[list[str]]:
    """Makes the death of a worker raise an error only when the loader waits for its batch.

    Otherwise torch raises it at once in the main thread, for example in the middle of an update or
    while a checkpoint is written. Enter this after torch has started the workers.

    Yields:
        a list to which torch's messages about dead workers are appended.
    """
    reasons: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield reasons  # Python, and so torch, handles signals in the main thread only
        return
    torch_handler = signal.getsignal(signal.SIGCHLD)

    def note(number: int, frame: FrameType | None) -> None:
        try:
            if callable(torch_handler):
                torch_handler(number, frame)
        except RuntimeError as error:
            reasons.append(str(error).strip())

    signal.signal(signal.SIGCHLD, note)
    try:
        yield reasons
    finally:
        signal.signal(signal.SIGCHLD, torch_handler)
