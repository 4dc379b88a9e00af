"""Compiled variants of kernels: one by one when they are first launched, or many at once; and
Triton's folder of them, with what can go wrong with it.

Variants that were compiled in advance (see `prebuilt`) are only loaded. Without them, the hundred
variants of a Zipformer take a minute of one processor. Within
`compiled_together` a pass of the model launches no kernel: it only shows which variants the model
needs, and these are compiled in threads (most of Triton's compiler runs without Python's lock):

    pass     k1 k2 k1 k3 ...      results are undefined
    threads     [k1  ]
                 [k2    ]
                      [k3 ]

The entries of Triton's folder are named after its version, the source of the kernel and the
architecture of the GPU, and replaced in one step, so processes may share it. Triton's binaries do
not depend on the driver. A damaged entry is compiled again; if the folder cannot be written, a
temporary one takes its place.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pruned_rnnt.model.kernels import prebuilt
from pruned_rnnt.model.kernels.binary import Binary, Image, TooLargeError
from pruned_rnnt.system.console import progress_bar
from pruned_rnnt.system.device import wait_for_triton
from pruned_rnnt.system.out_of_memory import is_out_of_memory

logger = logging.getLogger(__name__)

# More threads wait for Python's lock.
_MOST_THREADS = 16
# Compilations that take longer have a progress bar or a line in the log.
_SILENT_SECONDS = 3.0
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


class Counts:
    """How many variants this process has compiled, loaded from Triton's cache, and taken from the
    files of `prebuilt`."""

    def __init__(self) -> None:
        self.compiled = 0
        self.loaded = 0
        self.prebuilt = 0
        self._lock = threading.Lock()

    def add(self, *, compiled: int = 0, loaded: int = 0, prebuilt: int = 0) -> None:
        with self._lock:
            self.compiled += compiled
            self.loaded += loaded
            self.prebuilt += prebuilt


counts = Counts()


def _listen(**facts: Any) -> None:
    is_loaded = facts["cache_hit"]
    counts.add(loaded=is_loaded, compiled=not is_loaded)
    if _other_listener is not None:
        _other_listener(**facts)


_other_listener = triton.knobs.compilation.listener
triton.knobs.compilation.listener = _listen


def compile_variant(jit: Any, key: tuple[Any, ...]) -> Binary:
    """The variant of a kernel, loaded on the current device.

    Args:
        jit: Triton's function.
        key: device, number of warps, and `Bound.parts`.
    """
    device, num_warps, *parts = key
    target = _target(device)
    try:
        return Binary(find_image(jit, num_warps, parts, target))
    except TooLargeError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if prebuilt.give_up(target.arch, error):
            return compile_variant(jit, key)
        with repaired(error):
            return Binary(find_image(jit, num_warps, parts, target))


def _target(device: int) -> GPUTarget:
    major, minor = torch.cuda.get_device_capability(device)
    return GPUTarget("cuda", 10 * major + minor, 32)


def find_image(jit: Any, num_warps: int, parts: Sequence[Any], target: GPUTarget) -> Image:
    """A variant that was compiled in advance or is in Triton's cache, or else from its compiler."""
    if not (triton.knobs.compilation.always_compile or other_code_is_wanted()):
        found = prebuilt.image(jit, num_warps, parts, target.arch)
        if found is not None:
            counts.add(prebuilt=1)
            return found
    return compiled_image(jit, num_warps, parts, target)


def other_code_is_wanted() -> bool:
    """True if environment variables or settings of Triton change what it compiles."""
    knobs = triton.knobs
    return bool(
        get_cache_invalidating_env_vars()
        or knobs.compilation.override
        or knobs.compilation.instrumentation_mode
        or knobs.runtime.debug
    )


def compiled_image(jit: Any, num_warps: int, parts: Sequence[Any], target: GPUTarget) -> Image:
    """A variant from Triton's cache, or else from its compiler; needs no GPU."""
    wait_for_triton()
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for index, (name, part) in enumerate(zip(jit.arg_names, parts, strict=True)):
        if index in jit.constexprs or not isinstance(part, str):
            signature[name] = "constexpr"
            constants[index,] = part
            continue
        signature[name], _, divisor = part.partition(":")
        if divisor:
            attributes[index,] = [["tt.divisibility", int(divisor)]]
    source = ASTSource(jit, signature, constants, attributes)
    compiled = triton.compile(source, target=target, options={"num_warps": num_warps})
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise NotImplementedError(f"kernel {metadata.name} needs scratch memory")
    types = tuple(each for each in signature.values() if each != "constexpr")
    threads = metadata.num_warps * metadata.target.warp_size
    return Image(metadata.name, compiled.asm["cubin"], types, metadata.shared, threads)


class Collector:
    """Compiles the variants of the kernels that are called, and launches none."""

    def __init__(self, device: int) -> None:
        self.futures: dict[Any, Future[Image]] = {}
        self._device, self._target = device, _target(device)
        threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="compile")

    def add(self, kernel: Any, num_warps: int, parts: Sequence[Any]) -> None:
        """Start to compile a variant, if it is new."""
        key = (self._device, num_warps, *parts)
        if key in kernel.compiled or (kernel, key) in self.futures:
            return
        self.futures[kernel, key] = self._pool.submit(
            find_image, kernel.jit, num_warps, parts, self._target
        )

    def finish(self, started: float) -> None:
        """Wait for all variants. One that fails is compiled, and fails, again when launched."""
        futures = list(self.futures.values())
        left = started + _SILENT_SECONDS - time.monotonic()
        if wait(futures, timeout=max(left, 0.0)).not_done:
            _wait_visibly(futures)
        self._pool.shutdown()
        for (kernel, key), future in self.futures.items():
            if future.exception() is None:
                with suppress(RuntimeError):
                    kernel.compiled[key] = Binary(future.result())

    def cancel(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _wait_visibly(futures: list[Future[Any]]) -> None:
    """Wait with a progress bar on a terminal, and a line in the log elsewhere."""
    with ExitStack() as stack:
        if sys.stderr is not None and sys.stderr.isatty():
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


class Names:
    """Notes the variants of the kernels that are called, and launches none.

    Attributes:
        found: Triton's function, number of warps, and parts (see `launch.Bound`).
    """

    def __init__(self) -> None:
        self.found: set[tuple[Any, int, tuple[Any, ...]]] = set()

    def add(self, kernel: Any, num_warps: int, parts: Sequence[Any]) -> None:
        self.found.add((kernel.jit, num_warps, tuple(parts)))


collector: Collector | Names | None = None


@contextmanager
def listed() -> Iterator[Names]:
    """Kernels called within the context are noted, neither compiled nor launched."""
    global collector
    if collector is not None:
        raise RuntimeError("kernels are already being collected")
    collector = names = Names()
    try:
        yield names
    finally:
        collector = None


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
    before = counts.compiled, counts.prebuilt, counts.loaded
    index = torch.cuda.current_device() if device.index is None else device.index
    with one_process_compiles():
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
        now = counts.compiled, counts.prebuilt, counts.loaded
        compiled, installed, loaded = (a - b for a, b in zip(now, before, strict=True))
        logger.info(
            "fused kernels: %d compiled, %d installed with the package, %d loaded from %s, %.1f s",
            compiled,
            installed,
            loaded,
            cache_folder(),
            time.monotonic() - started,
        )


def cache_folder() -> Path:
    """Triton's cache folder, TRITON_CACHE_DIR unless it was replaced."""
    return Path(triton.knobs.cache.dir)


@contextmanager
def repaired(error: Exception) -> Iterator[None]:
    """Remove the reason why a kernel could be neither loaded nor compiled, if it lies in the cache.

    Within the context, Triton compiles kernels even if the cache has them, which replaces damaged
    entries.
    """
    with _repair_lock:
        if isinstance(error, OSError) and error.errno in _NOT_WRITABLE:
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
    path = cache_folder()
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
    for path in cache_folder().glob("*/__grp__*.json"):
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
        cache_folder().mkdir(parents=True, exist_ok=True)
        handle = os.open(cache_folder(), os.O_RDONLY | os.O_CLOEXEC)
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
