"""OpenMP's threads beside other busy processes: waiting threads then sleep instead of spinning.

torch's operations on the CPU end at barriers, where GNU's library lets threads spin for
milliseconds before they sleep. On an idle machine the next operation ends the wait, and nothing is
faster. Beside other processes, a thread that spins keeps its processor from the thread that it
waits for, and a training with half of the machine becomes many times slower.

How long threads spin is read from the environment when the library is loaded, usually by `import
torch`. But the library spins for about a microsecond only while it has more threads than the
machine has processors. So a look at the load of the processors every tenth of a second decides
whether an idle team of threads is held beside torch's.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

# Seconds between two looks; seconds without busy neighbours until threads may spin again; and how
# many processors neighbours may use of those that torch's threads need.
_INTERVAL, _QUIET, _SPARE = 0.1, 1.0, 0.5

# The kernel's CPU times of a processor: all but idle (3), waiting for a disk (4), and guests, which
# are part of the first two. Stolen time (7) is that of other virtual machines.
_BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)


# Rounds of the loop, some ten microseconds together: longer than torch takes between two
# operations, and shorter than the turn of another process.
_SPINS = "1000"


def limit_spinning() -> None:
    """Before torch is imported: let waiting threads sleep soon, unless the user has chosen."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


@contextmanager
def sharing_processors() -> Iterator[None]:
    """Within it, OpenMP's threads spin only while other processes leave them the processors.

    It does nothing if OMP_WAIT_POLICY or GOMP_SPINCOUNT is set, without Linux, or if torch has
    another OpenMP library. Contexts may be nested, and may overlap in several threads.
    """
    if not Path("/proc/stat").exists() or {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        yield
        return
    _WATCH.enter()
    try:
        yield
    finally:
        _WATCH.leave()


class _Load(NamedTuple):
    """Seconds of a clock, and CPU seconds that others than this process have used until then."""

    seconds: float
    others: float


class _Watch:
    """The thread that looks at the load while at least one context is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contexts = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # Kept between contexts, so that a short one begins with what is known.
        self._before: _Load | None = None
        self._busy_until = 0.0

    def enter(self) -> None:
        with self._lock:
            self._contexts += 1
            if self._contexts == 1:
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._stop,), name="pruned_rnnt-load", daemon=True
                )
                self._thread.start()

    def leave(self) -> None:
        with self._lock:
            self._contexts -= 1
            if self._contexts == 0 and self._thread is not None:
                self._stop.set()
                self._thread.join()

    def _run(self, stop: threading.Event) -> None:
        team: _IdleTeam | None = None
        wait = 0.0
        while not stop.wait(wait):
            began = time.perf_counter()
            busy = self._neighbours_are_busy()
            if busy and team is None:
                team = _IdleTeam()
            elif not busy and team is not None:
                team.end()
                team = None
            # The kernel takes milliseconds for the table of hundreds of processors.
            wait = max(_INTERVAL, 50 * (time.perf_counter() - began))
        if team is not None:
            team.end()

    def _neighbours_are_busy(self) -> bool:
        now = time.monotonic()
        if self._before is None or now - self._before.seconds >= _INTERVAL / 2:
            load = _load()
            if self._before is not None:
                elapsed = load.seconds - self._before.seconds
                others = (load.others - self._before.others) / elapsed
                threads = _torch_threads()
                left = len(os.sched_getaffinity(0)) - threads
                if threads > 1 and others > left + _SPARE:
                    self._busy_until = now + _QUIET
            self._before = load
        return now < self._busy_until


class _IdleTeam:
    """Threads of OpenMP that sleep, and make waiting threads of all other teams sleep soon."""

    def __init__(self) -> None:
        self._end = threading.Event()
        # A team belongs to the thread that starts it, and ends with it.
        self._thread = threading.Thread(target=self._run, name="pruned_rnnt-idle", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        # With torch's threads, one more than there are processors.
        size = max(2, len(os.sched_getaffinity(0)) - _torch_threads() + 2)
        for library in _libraries():
            nothing = ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p)
            library.GOMP_parallel(nothing, None, ctypes.c_uint(size), ctypes.c_uint(0))
        self._end.wait()


def _load() -> _Load:
    processors = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *columns = line.split()
        if name in processors:
            ticks += sum(int(columns[each]) for each in _BUSY_COLUMNS)
    return _Load(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK") - time.process_time())


def _torch_threads() -> int:
    """Threads of torch's operations; 1 before it is imported."""
    threads = getattr(sys.modules.get("torch"), "get_num_threads", None)
    return 1 if threads is None else int(threads())


def _libraries() -> list[Any]:
    """GNU's OpenMP libraries of this process; packages bring their own."""
    paths = {
        line.split(maxsplit=5)[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/libgomp" in line
    }
    return [ctypes.CDLL(path) for path in sorted(paths)]


_WATCH = _Watch()
