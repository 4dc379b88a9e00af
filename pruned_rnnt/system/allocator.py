"""When this process frees memory: blocks of the C library, Python's garbage, and all of it."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NoReturn

# Of glibc's <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_BYTES = 2**30


def keep_freed_memory() -> bool:
    """Let this process keep freed blocks of up to 1 GiB for the next ones; True if it does.

    By default, glibc returns blocks above 32 MiB to the system at once, and the system fills the
    next one with zeros, page by page: a fifth of the time of an encoder. For processes that run a
    model on the CPU until they end. Without glibc it does nothing.
    """
    mallopt = _of_c_library("mallopt")
    if mallopt is None:
        return False
    accepted = [mallopt(option, _BYTES) for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD)]
    return all(accepted)


def return_freed_memory() -> None:
    """Give the freed blocks that glibc keeps for the next ones back to the system.

    Without glibc it does nothing. It may take tenths of a second.
    """
    if (malloc_trim := _of_c_library("malloc_trim")) is not None:
        malloc_trim(0)


def _of_c_library(name: str) -> Any:
    """A function of Linux's C library; None if there is none of this name, as in musl."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Nothing is collected within the context."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def leave_inherited_garbage() -> None:
    """Processes that are forked from this one never collect the objects that they inherit.

    CUDA does not work in a forked process: one that frees a CUDA tensor or graph is aborted.
    Garbage that this process has not collected before the fork may hold both, for example after a
    training.
    """
    if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
        os.register_at_fork(after_in_child=gc.freeze)


def end_without_collection() -> None:
    """Let this process end without a last search for garbage among the objects of its libraries.

    It takes as long as importing half of torch, and the system takes back all memory anyway.
    Functions of `atexit` run before as always. Not finalised are objects that refer to each other,
    and those in the globals of modules.
    """
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


def end_process(code: int) -> NoReturn:
    """End this process with an exit code, after its threads and the functions of `atexit`.

    The modules and libraries are not taken apart one by one: the system frees them in a tenth of
    the time.
    """
    steps = getattr(threading, "_shutdown", None), getattr(atexit, "_run_exitfuncs", None)
    # Profilers of CUDA write their results when the libraries are unloaded.
    if None in steps or "CUDA_INJECTION64_PATH" in os.environ:
        sys.exit(code)
    for step in filter(None, steps):
        step()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed by the caller
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
