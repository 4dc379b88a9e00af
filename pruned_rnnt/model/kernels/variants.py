"""Compiled variants of kernels: one by one when they are first launched, or many at once.

A Zipformer has about a hundred variants, which take half a minute one after another. Within
`compiled_together` a pass of the model launches no kernel: it only shows which variants the model
needs. If Triton's cache lacks the first one, processes compile the others. Threads load them:

    pass         k1 k2 k1 k3 ...          results are undefined
    processes       [k2     ] [k4 ..
                          [k3   ] [k5 ..
    threads                        load k2, k3, ...
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
import triton

from pruned_rnnt.model.kernels import compile_cache
from pruned_rnnt.model.kernels.compile_processes import CompileProcesses
from pruned_rnnt.system.console import progress_bar
from pruned_rnnt.system.out_of_memory import is_out_of_memory

logger = logging.getLogger(__name__)

_MOST_WORKERS = 16
# For fewer variants, starting processes takes longer than they save.
_LEAST_FOR_PROCESSES = 16
# Compilations that take longer have a progress bar or a line in the log.
_SILENT_SECONDS = 3.0


class Counts:
    """How many variants this process has compiled, and loaded from Triton's cache."""

    def __init__(self) -> None:
        self.compiled = 0
        self.loaded = 0
        self._lock = threading.Lock()

    def add(self, *, is_loaded: bool) -> None:
        with self._lock:
            self.loaded += is_loaded
            self.compiled += not is_loaded

    def add_compiled_elsewhere(self) -> None:
        """A variant that another process compiled was loaded, and is not to count as such."""
        with self._lock:
            self.loaded -= 1
            self.compiled += 1


counts = Counts()


def _listen(**facts: Any) -> None:
    counts.add(is_loaded=facts["cache_hit"])
    if _other_listener is not None:
        _other_listener(**facts)


_other_listener = triton.knobs.compilation.listener
triton.knobs.compilation.listener = _listen


def compile_variant(jit: Any, device: int, arguments: tuple[Any, ...], num_warps: int) -> Any:
    """The variant of a kernel for these arguments, loaded on the device; see `compile_cache`.

    Args:
        jit: Triton's function.
    """

    def variant() -> Any:
        compiled = jit.warmup(*arguments, grid=(1,), num_warps=num_warps)
        _ = compiled.run  # loads it
        return compiled

    with torch.cuda.device(device):
        try:
            return variant()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            jit.device_caches.clear()  # it keeps kernels that could not be loaded
            with compile_cache.repaired(error):
                return variant()


class _Variant(NamedTuple):
    """A kernel, the key of the variant, and arguments for which it is to be compiled."""

    kernel: Any
    key: Any
    arguments: tuple[Any, ...]
    num_warps: int


class Collector:
    """Compiles the variants of the kernels that are called, and launches none."""

    def __init__(self, device: int) -> None:
        self.futures: list[Future[None]] = []
        self._device = device
        self._known: set[Any] = set()
        self._waiting: list[_Variant] = []
        self._started: list[tuple[_Variant, Callable[[], bool]]] = []
        self._is_held = False
        self._workers = min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
        self._threads = ThreadPoolExecutor(self._workers, thread_name_prefix="compile")
        self._processes: CompileProcesses | None = None

    def add(self, kernel: Any, key: Any, arguments: tuple[Any, ...], num_warps: int) -> None:
        """Start to compile or load a variant, if it is new."""
        if key in kernel.compiled or (kernel, key) in self._known:
            return
        self._known.add((kernel, key))
        variant = _Variant(kernel, key, arguments, num_warps)
        if not self.futures:
            compiled = counts.compiled
            self._submit(variant)
            wait(self.futures)
            self._is_held = counts.compiled > compiled
        elif not self._is_held:
            self._submit(variant)
        else:
            self._waiting.append(variant)
            if len(self._waiting) == _LEAST_FOR_PROCESSES:
                # Threads compile if there is no memory for processes, or in a daemon of Python's
                # multiprocessing, which may have none.
                with suppress(OSError, AssertionError):
                    self._processes = CompileProcesses(self._workers, self._device)
                self._is_held = False
                self._submit_waiting()

    def _submit_waiting(self) -> None:
        for variant in self._waiting:
            self._submit(variant)
        self._waiting.clear()

    def _submit(self, variant: _Variant) -> None:
        if self._processes is None:
            self.futures.append(self._threads.submit(self._compile, variant))
        else:
            was_compiled = self._processes.start(
                variant.kernel.jit, variant.arguments, variant.num_warps
            )
            self._started.append((variant, was_compiled))

    def _compile(self, variant: _Variant) -> None:
        variant.kernel.compiled[variant.key] = compile_variant(
            variant.kernel.jit, self._device, variant.arguments, variant.num_warps
        )

    def _load(self, variant: _Variant, was_compiled: Callable[[], bool]) -> None:
        is_elsewhere = was_compiled()
        self._compile(variant)
        if is_elsewhere:
            counts.add_compiled_elsewhere()

    def finish(self, started: float) -> None:
        """Wait for all variants. One that fails is compiled, and fails, again when launched."""
        self._submit_waiting()
        # Not before: threads that load would take Python's lock from the pass.
        self.futures += [self._threads.submit(self._load, *each) for each in self._started]
        left = started + _SILENT_SECONDS - time.monotonic()
        if wait(self.futures, timeout=max(left, 0.0)).not_done:
            _wait_visibly(self.futures)
        self._threads.shutdown()
        self._close()

    def cancel(self) -> None:
        self._close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _close(self) -> None:
        if self._processes is not None:
            self._processes.close()


def _wait_visibly(futures: list[Future[None]]) -> None:
    """Wait with a progress bar on a terminal, and a line in the log elsewhere."""
    with ExitStack() as stack:
        if sys.stderr.isatty():
            from rich.console import Console

            console = Console(stderr=True)
            bar = stack.enter_context(progress_bar(console, "compiling kernels", len(futures)))
        else:
            bar = stack.enter_context(progress_bar(None, "", None))
            logger.info("compiling %d kernels, which later starts find in the cache", len(futures))
        while True:
            done, not_done = wait(futures, timeout=0.2)
            bar.show(len(done))
            if not not_done:
                return


collector: Collector | None = None


@contextmanager
def compiled_together(device: torch.device) -> Iterator[None]:
    """Kernels called within the context are compiled by its end, in parallel, and not launched.

    What they would write is undefined meanwhile. A line in the log says how many were compiled or
    loaded, and how long it took.
    """
    global collector
    if collector is not None:
        raise RuntimeError("kernels are already being collected")
    started = time.monotonic()
    compiled, loaded = counts.compiled, counts.loaded
    index = torch.cuda.current_device() if device.index is None else device.index
    with compile_cache.one_process_compiles():
        found = collector = Collector(index)
        try:
            yield
        except BaseException:
            found.cancel()
            raise
        finally:
            collector = None
        found.finish(started)
    if found.futures:
        logger.info(
            "fused kernels: %d compiled, %d loaded from %s, %.1f s",
            counts.compiled - compiled,
            counts.loaded - loaded,
            compile_cache.folder(),
            time.monotonic() - started,
        )
