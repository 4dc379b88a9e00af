"""What ends training early: signals that ask it to stop, and data workers or other training
processes that die."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import FrameType
from typing import Any

from torch import distributed

from pruned_rnnt.data.input.worker_signals import WorkerDiedError, worker_deaths_deferred
from pruned_rnnt.system.out_of_memory import is_out_of_memory
from pruned_rnnt.train.engine.bad_steps import TrainingStopped
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.task import Loader

logger = logging.getLogger(__name__)

# Sent by schedulers before a job ends, by a terminal that closes, and by Ctrl-C.
_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
_NOTE = "training saves and stops after this step; Ctrl-C again ends it without saving\n"


class StopSignals:
    """A context manager that records signals, which would otherwise end the process.

    A second Ctrl-C raises KeyboardInterrupt. Ignored signals, such as SIGHUP under nohup, stay
    ignored.

    received: the first signal, None before.
    """

    def __init__(self, *, show_note: bool) -> None:
        """show_note: print a note on standard error at the first Ctrl-C."""
        self.received: signal.Signals | None = None
        self._show_note = show_note
        self._interrupted = False
        self._before: dict[signal.Signals, Any] = {}

    def __str__(self) -> str:
        """The reason why training stopped, as the end of "training stopped ..."."""
        return f"by {self.received.name}" if self.received else "because another process stops"

    @property
    def exit_code(self) -> int:
        """The exit code that a shell shows for the signal; that of SIGTERM if none was received."""
        return 128 + (self.received or signal.SIGTERM)

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python delivers signals to the main thread only
        for number in (signal.Signals[name] for name in _NAMES if hasattr(signal, name)):
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):
                self._before[number] = handler
                signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._interrupted:
            raise KeyboardInterrupt
        if self.received is None:
            self.received = signal.Signals(number)
        if number == signal.SIGINT:
            self._interrupted = True
            if self._show_note:
                # Unbuffered: the signal may interrupt a write to the buffered stream.
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, _NOTE.encode())


class BatchGroups:
    """Gathers the batches of a loader into groups of `accumulate`.

    lost_worker: the reason why a data worker died; empty if none did. With several training
        processes, the last group then holds the batches that were loaded, possibly none, and its
        step must be the last one. With one training process, the error is raised.
    """

    def __init__(self, loader: Loader, accumulate: int, ranks: Ranks) -> None:
        self.loader = loader
        self.accumulate = accumulate
        self.ranks = ranks
        self.lost_worker = ""
        self._reasons: list[str] | None = None

    def watch_workers(self, stack: ExitStack) -> None:
        """Until `stack` closes, raise the error of a dead worker only when its batch is fetched.

        Call it once the workers exist; calls after the first one do nothing.
        """
        if self._reasons is None:
            self._reasons = stack.enter_context(worker_deaths_deferred())
            stack.callback(setattr, self, "_reasons", None)

    def groups(self, batches: Iterator[Any]) -> Iterator[tuple[list[Any], int]]:
        """Yield groups, each with the number of batches of the epoch that it uses up.

        Raises:
            WorkerDiedError: a worker died, and training has one process.
        """
        group: list[Any] = []
        try:
            for batch in batches:
                group.append(batch)
                if len(group) == self.accumulate:
                    yield group, len(group)
                    group = []
        except WorkerDiedError as error:
            self.lost_worker = self.reason(error)
            if self.ranks.world_size == 1:
                raise
            # The other processes load their whole group; the step tells them to stop. The batches
            # that are missing here are left out of the epoch.
            missing = self.accumulate - len(group)
            logger.warning("%s: %d batches are left out", self.lost_worker, missing)
            self.loader.agree_without_fetching(missing)
            yield group, self.accumulate
        else:
            if group:
                yield group, len(group)

    def reason(self, error: WorkerDiedError) -> str:
        """torch's message about the dead worker, or else the one about its missing batch."""
        return (self._reasons[-1] if self._reasons else str(error)).rstrip(". ")


def stopped_without_worker(step: int, reason: str) -> TrainingStopped:
    """The error that ends training after `step` because a worker died; reason: of `BatchGroups`."""
    return TrainingStopped(
        f"training stopped after step {step}: {reason}. The same command continues from the newest "
        "checkpoint; if the system killed the worker to free memory, lower data.num_workers"
    )


def is_of_exchange(error: RuntimeError) -> bool:
    """Whether gloo or NCCL could not exchange data: another process has probably ended.

    False for mistakes in the calls, which gloo calls "enforce fail" and NCCL "invalid usage", and
    for NCCL's lack of memory.
    """
    text = str(error)
    if is_out_of_memory(error) or "enforce fail" in text or "invalid usage" in text:
        return False
    # gloo has no type of its own, but names its source file.
    return isinstance(error, distributed.DistError) or (
        type(error) is RuntimeError and "gloo/transport/" in text
    )


def stopped_without_process(step: int, error: RuntimeError) -> TrainingStopped:
    """The error that ends training after `step` because of an error `is_of_exchange`."""
    # NCCL gives its reason in the last line.
    reason = " ".join(str(error).split())
    return TrainingStopped(
        f"training stopped after step {step}: the processes can no longer exchange data, probably "
        "because another one ended (its messages or the system's log say why) or hangs. The same "
        f"command continues from the newest checkpoint ({reason})"
    )
