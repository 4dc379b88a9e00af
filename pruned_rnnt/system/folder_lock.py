"""A lock that lets one process at a time work in a folder.

filelock is not a substitute: it leaves a file in the folder, and its lock survives in loader
workers that were forked by a killed process.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_handles: set[int] = set()


def _close_in_child() -> None:
    """Close the locks in a forked child: loader workers outlive a killed parent by seconds."""
    for handle in _handles:
        os.close(handle)
    _handles.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def exclusive_folder_lock(
    folder: Path, state: str = "is in use", *, wait: bool = False
) -> Iterator[None]:
    """Hold an exclusive lock on an existing folder for the length of the context.

    The operating system locks the folder itself, so that no file is left behind, and releases the
    lock when the process ends, however it ends. A file system without locks counts as unlocked.

    Args:
        state: for the error message, which is "FOLDER {state} by another process".
        wait: until the other process releases it, for locks that are held for moments.

    Raises:
        ValueError: another process holds the lock, without `wait`.
    """
    handle = os.open(folder, os.O_RDONLY)
    _handles.add(handle)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise ValueError(
                f"{folder} {state} by another process: wait for it, end it, or choose "
                "another folder"
            ) from error
        except OSError:
            pass
        yield
    finally:
        if handle in _handles:
            _handles.remove(handle)
            os.close(handle)
