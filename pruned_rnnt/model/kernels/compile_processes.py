"""Processes that compile variants of kernels into Triton's cache, from which this one loads them.

Half of Triton's compiler holds Python's lock, so threads keep only a few cores busy. Forked
processes keep all of them busy, and need not import anything:

    this process   k1 k2 k3 ...                         load k1, k2, k3 ...
    child 1           [k1          ] -> cache [k3 ...
    child 2               [k2      ] -> cache [k4 ...

They compile for the GPU and never use it, because a forked process cannot.
"""

from __future__ import annotations

import importlib
import multiprocessing
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import triton

# Far longer than a compilation takes: a child died, or waits for a lock that a thread of this
# process held while it forked.
_MOST_SECONDS = 60.0
_asked = threading.local()


def _hook(*, compile: dict[str, Any], **facts: Any) -> Any:  # Triton names its argument so
    """Triton calls this before it compiles; true: it shall not."""
    if (found := getattr(_asked, "specialisations", None)) is not None:
        found.append(compile["specialization_data"])
        return True
    return _other_hook and _other_hook(compile=compile, **facts)


_other_hook = triton.knobs.runtime.jit_cache_hook
triton.knobs.runtime.jit_cache_hook = _hook


def _specialisation(jit: Any, arguments: tuple[Any, ...], num_warps: int) -> str:
    """What Triton needs to know of arguments to compile a variant for them."""
    found: list[str] = []
    _asked.specialisations = found
    try:
        jit.warmup(*arguments, grid=(1,), num_warps=num_warps)
    finally:
        _asked.specialisations = None
    return found[0]


class CompileProcesses:
    """Forked processes that compile for a device; to be closed."""

    def __init__(self, count: int, device: int) -> None:
        self._device = device
        self._ended = False
        with warnings.catch_warnings():
            # Python warns that threads may hold locks; see _MOST_SECONDS.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pool = multiprocessing.get_context("fork").Pool(count, _start)

    def start(self, jit: Any, arguments: tuple[Any, ...], num_warps: int) -> Callable[[], bool]:
        """Start to compile a variant.

        Returns:
            Function that waits for it, and returns whether it was compiled. If not, the cache may
            still lack it; whoever compiles it sees why.
        """
        try:
            data = _specialisation(jit, arguments, num_warps)
        except Exception:
            return lambda: False
        task = (jit.fn.__module__, jit.fn.__name__, self._device, data)
        result = self._pool.apply_async(_compile, task)

        def was_compiled() -> bool:
            deadline = time.monotonic() + _MOST_SECONDS
            while not self._ended:
                result.wait(0.5)
                if result.ready():
                    return result.successful() and result.get()
                self._ended = time.monotonic() > deadline
            return False

        return was_compiled

    def close(self) -> None:
        """End the processes, whether they have finished or not."""
        self._ended = True
        self._pool.terminate()


def _start() -> None:
    # The handlers of a training only note that it shall stop.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _compile(module: str, name: str, device: int, data: str) -> bool:
    """In a child: compile a variant of a `Kernel`; false if the cache has it."""
    is_hit = True

    def listen(*, cache_hit: bool, **_: Any) -> None:
        nonlocal is_hit
        is_hit = cache_hit

    triton.knobs.compilation.listener = listen
    # torch would ask CUDA.
    triton.runtime.driver.active.get_current_device = lambda: device
    # Some kernels are first imported after the process was forked.
    getattr(importlib.import_module(module), name).jit.preload(data)
    return not is_hit
