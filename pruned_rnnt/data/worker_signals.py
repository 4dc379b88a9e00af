"""Signals in the processes that load data: what ends a job is the business of their parent.

Schedulers, and Ctrl-C, often signal every process of a job. Training has to finish its step and
save, for which it needs its workers; but when it ends them itself, they go at once.
"""

from __future__ import annotations

import os
import signal
import threading


def leave_signals_to_the_parent(_: int) -> None:
    """For DataLoader(worker_init_fn=...): takes SIGTERM from the parent alone, SIGINT from nobody.

    Where the sender of a signal cannot be known (outside Linux), SIGTERM ends the worker as ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):
        return
    # Threads that come later inherit this.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_the_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_the_parent(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
