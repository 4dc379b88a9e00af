"""Signals that ask training to save and stop."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any

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
