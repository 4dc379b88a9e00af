"""Notes that decoders in C print on standard error, past everything that Python can catch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_decoder_notes(wanted: bool = True) -> Iterator[None]:
    """Drops what is written to the file descriptor of standard error meanwhile.

    libmpg123 comments on damaged mp3 there, among progress bars and reports. The descriptor is that
    of the whole process, hence: around the decoder alone, and only where it is needed.
    """
    try:
        kept = os.dup(2) if wanted else -1
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
