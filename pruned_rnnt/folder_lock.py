"""One program at a time works in a folder; a second one is told so at once."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_handles: set[int] = set()


def _leave_to_the_parent() -> None:
    """Loader workers outlive a killed program by seconds; they shall not hold its locks."""
    for handle in _handles:
        os.close(handle)
    _handles.clear()


os.register_at_fork(after_in_child=_leave_to_the_parent)


@contextmanager
def only_one(folder: Path, what: str) -> Iterator[None]:
    """Nobody else is inside for this folder, which exists.

    The lock is the operating system's, on the folder itself: it leaves no file, and goes with the
    process however that ends. File systems that have no such locks are taken as free.

    Args:
        what: the sentence about the folder that goes before "by another process".

    Raises:
        ValueError: somebody else is.
    """
    handle = os.open(folder, os.O_RDONLY)
    _handles.add(handle)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{folder} {what} by another process: wait for it, end it, or choose another folder"
            ) from error
        except OSError:
            pass
        yield
    finally:
        if handle in _handles:
            _handles.remove(handle)
            os.close(handle)
