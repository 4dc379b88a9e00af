"""Triton's folder of compiled kernels, and what can go wrong with it.

Its entries are named after Triton's version, the source of the kernel and the architecture of the
GPU, and replaced in one step, so processes may share it. Triton's binaries do not depend on the
driver. A damaged entry is compiled again; if the folder cannot be written, a temporary one takes
its place.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import triton

logger = logging.getLogger(__name__)

_NOT_WRITABLE = (
    errno.EACCES,
    errno.EDQUOT,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)
_MOST_SECONDS_FOR_OTHERS = 120.0
_repair_lock = threading.RLock()


def folder() -> Path:
    """Triton's cache folder, TRITON_CACHE_DIR unless it was replaced."""
    return Path(triton.knobs.cache.dir)


@contextmanager
def repaired(error: Exception) -> Iterator[None]:
    """Remove the reason why a kernel could be neither loaded nor compiled, if it lies in the cache.

    Within the context, Triton compiles kernels even if the cache has them, which replaces damaged
    entries.
    """
    with _repair_lock:
        path = getattr(error, "path", None)
        if isinstance(error, ImportError) and path is not None:
            # A damaged library for the launches of a kernel; Triton replaces it only if it is gone.
            if folder() in Path(path).parents:
                Path(path).unlink(missing_ok=True)
        elif isinstance(error, OSError) and error.errno in _NOT_WRITABLE:
            _use_temporary_folder(error)
        elif isinstance(error, ValueError):
            _remove_unreadable_lists()
        before = triton.knobs.compilation.always_compile
        triton.knobs.compilation.always_compile = True
        try:
            yield
        finally:
            triton.knobs.compilation.always_compile = before


def _use_temporary_folder(error: OSError) -> None:
    """Replace the cache folder, unless another thread has done so."""
    path = folder()
    if error.filename is not None and path not in (
        Path(error.filename),
        *Path(error.filename).parents,
    ):
        return
    temporary = tempfile.mkdtemp(prefix="triton-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    triton.knobs.cache.dir = temporary
    logger.warning(
        "compiled kernels cannot be kept in %s (%s), so each start compiles them: set "
        "TRITON_CACHE_DIR to a folder that can be written",
        path,
        error.strerror,
    )


def _remove_unreadable_lists() -> None:
    """Remove damaged lists of an entry's files, which Triton reads even where it compiles."""
    for path in folder().glob("*/__grp__*.json"):
        try:
            json.loads(path.read_bytes())
        except ValueError:
            path.unlink(missing_ok=True)


@contextmanager
def one_process_compiles() -> Iterator[None]:
    """Let the first process of a machine that enters compile; others wait, and then load.

    The operating system ends the lock with its process. Where it cannot lock, all processes
    compile.
    """
    try:
        folder().mkdir(parents=True, exist_ok=True)
        handle = os.open(folder(), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        is_first = _lock_or_wait(handle)
        if not is_first:
            # Those that have waited go on together.
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)
        yield
    finally:
        os.close(handle)


def _lock_or_wait(handle: int) -> bool:
    """Lock the folder; False if another process held the lock meanwhile."""
    deadline = time.monotonic() + _MOST_SECONDS_FOR_OTHERS
    waited = False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return not waited
        except BlockingIOError:
            if not waited:
                logger.info("waiting for another process that compiles kernels")
            waited = True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        except OSError:
            return not waited
