"""Suppresses messages that C decoders print on standard error, which Python cannot catch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_decoder_messages(enabled: bool = True) -> Iterator[None]:
    """Discards everything that is written to file descriptor 2 inside the context.

    libmpg123 prints warnings about damaged mp3 files there, in the middle of progress bars. The
    descriptor belongs to the whole process, so use this around a decoder call only.
    """
    try:
        kept = os.dup(2) if enabled else -1
    except OSError:  # standard error is closed
        kept = -1
    if kept < 0:
        yield
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
