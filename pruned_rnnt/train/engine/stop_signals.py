"""Signals that ask training to save and stop."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Any

# What schedulers send before a job's end, a terminal when it closes, and Ctrl-C.
_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
_NOTE = "training saves and stops after this step; Ctrl-C again ends it without saving\n"


class StopSignals:
    """A context manager; inside, signals are noted instead of ending the process.

    A second Ctrl-C raises KeyboardInterrupt. Signals that are ignored, as SIGHUP is under nohup,
    stay ignored.

    received: the first signal, None before.
    """

    def __init__(self, *, show_note: bool) -> None:
        """show_note: answer the first Ctrl-C on standard error."""
        self.received: signal.Signals | None = None
        self._show_note = show_note
        self._interrupted = False
        self._before: dict[signal.Signals, Any] = {}

    def __str__(self) -> str:
        """Why training stopped, if it did."""
        return f"by {self.received.name}" if self.received else "because another process stops"

    @property
    def exit_code(self) -> int:
        """What a shell says of a process that the signal ended; SIGTERM if there was none."""
        return 128 + (self.received or signal.SIGTERM)

    def __enter__(self) -> StopSignals:
        for number in (signal.Signals[name] for name in _NAMES if hasattr(signal, name)):
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):
                self._before[number] = handler
                signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._interrupted:
            raise KeyboardInterrupt
        if self.received is None:
            self.received = signal.Signals(number)
        if number == signal.SIGINT:
            self._interrupted = True
            if self._show_note:
                # The signal may have come in the middle of a write to the buffered stream.
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, _NOTE.encode())
