"""Read recordings ahead in threads, in constant memory.

Decoders and resamplers run outside of Python's lock, so that a few threads keep a GPU busy. The
thread that uses the recordings launches kernels and needs this lock all the time; what is exchanged
for every recording is therefore little: two queues that are implemented in C.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from queue import Empty, SimpleQueue
from threading import Event, Semaphore, Thread
from typing import Any, Generic, NamedTuple, TypeVar

_Part = TypeVar("_Part")
_Recording = TypeVar("_Recording", bound=Iterable[Any])
# Parts of one recording that wait for their reader.
_MOST_PARTS = 4
# A thread that waits looks this often whether it has to stop, in seconds.
_PATIENCE = 0.05


class _End(NamedTuple):
    """The end of a recording, with the error that ended it."""

    error: BaseException | None


class _Reading(Generic[_Part]):
    """One recording, which a thread reads and another one iterates over."""

    def __init__(self, parts: Iterable[_Part], stop: Event) -> None:
        self._parts = parts
        self._stop = stop
        self._queue: SimpleQueue[_Part | _End] = SimpleQueue()
        self._places = Semaphore(_MOST_PARTS)

    def run(self) -> None:
        """Read the recording, in a thread."""
        try:
            for part in self._parts:
                if not self._wait_for_place():
                    return
                self._queue.put(part)
        except BaseException as error:  # raised again where the parts are used
            self._queue.put(_End(error))
        else:
            self._queue.put(_End(None))

    def _wait_for_place(self) -> bool:
        """Wait until few parts wait; False if nobody wants more of them."""
        while not self._stop.is_set():
            if self._places.acquire(timeout=_PATIENCE):
                return True
        return False

    def __iter__(self) -> Iterator[_Part]:
        while True:
            try:
                part = self._queue.get(timeout=_PATIENCE)
            except Empty:
                continue
            if isinstance(part, _End):
                if part.error is not None:
                    raise part.error
                return
            self._places.release()
            yield part


def read_ahead(
    recordings: Iterable[_Recording], *, threads: int, recordings_ahead: int
) -> Generator[tuple[_Recording, Iterable[Any]], None, None]:
    """Yield the recordings in order, each with its parts, while threads read the next ones.

    Use the parts of a recording before taking the next one. An error in a recording is raised where
    its parts are used. Close this generator to end the threads.

    Args:
        recordings: what a thread iterates over; taken as late as possible.
        recordings_ahead: how many are being read or wait to be used.
    """
    stop = Event()
    waiting: deque[tuple[_Recording, _Reading[Any]]] = deque()
    tasks: SimpleQueue[_Reading[Any] | None] = SimpleQueue()
    workers = [
        Thread(target=_read, args=(tasks, stop), name=f"audio_{number}", daemon=True)
        for number in range(threads)
    ]
    for worker in workers:
        worker.start()
    source = iter(recordings)
    try:
        while True:
            for recording in islice(source, recordings_ahead - len(waiting)):
                reading: _Reading[Any] = _Reading(recording, stop)
                tasks.put(reading)
                waiting.append((recording, reading))
            if not waiting:
                return
            yield waiting.popleft()
    finally:
        stop.set()
        for _ in workers:
            tasks.put(None)
        for worker in workers:
            worker.join()


def _read(tasks: SimpleQueue[_Reading[Any] | None], stop: Event) -> None:
    """Read one recording after the other, in a thread."""
    while (reading := tasks.get()) is not None:
        if not stop.is_set():
            reading.run()
