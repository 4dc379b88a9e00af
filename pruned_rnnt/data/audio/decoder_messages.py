"""Suppresses messages that C decoders print on standard error, which Python cannot catch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

# The threads inside the context share one redirection: the first one in makes it, the last one out
# ends it. `_kept` is the standard error of before.
_lock = Lock()
_inside = 0
_kept = -1


@contextmanager
def without_decoder_messages(enabled: bool = True) -> Iterator[None]:
    """Discards everything that is written to file descriptor 2 inside the context.

    libmpg123 prints warnings about damaged mp3 files there, in the middle of progress bars. The
    descriptor belongs to the whole process, so use this around a decoder call only. Threads may be
    inside at the same time.
    """
    if not enabled:
        yield
        return
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _inside, _kept
    with _lock:
        _inside += 1
        if _inside > 1:
            return
        try:
            _kept = os.dup(2)
        except OSError:  # standard error is closed
            _kept = -1
            return
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 2)
        os.close(nothing)


def _leave() -> None:
    global _inside, _kept
    with _lock:
        _inside -= 1
        if _inside == 0 and _kept >= 0:
            os.dup2(_kept, 2)
            os.close(_kept)
            _kept = -1
