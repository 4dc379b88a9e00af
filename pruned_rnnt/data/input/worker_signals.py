"""Signals in the processes that load data, and about them.

Schedulers, and Ctrl-C, often signal every process of a job. Training has to finish its step and
save, for which it needs its workers; but when it ends them itself, they go at once.
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


class WorkerDiedError(ChildProcessError):
    """A process that loads data is gone before its batch came; the message has its number."""


@contextmanager
def sigterm_waits() -> Iterator[None]:
    """Inside, SIGTERM is held back in this thread, and in all threads of workers that start there.

    A worker may have threads before leave_signals_to_the_parent runs in it (those of a BLAS, when a
    fork server's child imports numpy), and one that does not block SIGTERM would take it.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    if multiprocessing.get_start_method() != "fork":
        # Where it starts beside the first worker, it unblocks SIGTERM again.
        resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_the_parent(_: int) -> None:
    """For DataLoader(worker_init_fn=...): takes SIGTERM from the parent alone, others from nobody.
    Workers have to be started inside sigterm_waits.

    Where the sender of a signal cannot be known (outside Linux), SIGTERM ends the worker as ever.
    """
    for name in ("SIGINT", "SIGHUP", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(signal.Signals[name], signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):
        return
    # Threads that come later inherit this.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    # With a fork server the process above this one is another than the parent.
    parent = multiprocessing.parent_process()
    pid = os.getppid() if parent is None else parent.pid
    threading.Thread(target=_end_with_the_parent, args=(pid,), daemon=True).start()


def _end_with_the_parent(parent: int | None) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


@contextmanager
def deaths_wait_for_batches() -> Iterator[list[str]]:
    """Inside, the death of a worker raises an error where its batch is waited for, and only there.

    Without this torch raises it wherever the program is at that moment, as in the middle of an
    update or of writing a checkpoint. To be entered when torch has started workers.

    Yields:
        what torch had to say about deaths, as they come.
    """
    reasons: list[str] = []
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
