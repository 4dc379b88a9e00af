"""Runs cells in worker processes, so that a crash ends only its own cell."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.cells.cell import CRASH, Outcome

ROOT = Path(__file__).parent.parent.parent
TABLE = "tests.cells.table"
# A cell takes milliseconds; a compiled one seconds.
_SECONDS = 120
# Each holds a context of a CUDA device.
_MOST_WORKERS = 8


class _Worker:
    """A process that runs one cell after the other, and is started again after a crash."""

    def __init__(self, *arguments: str, backend: str | None = None) -> None:
        self.arguments = arguments
        chosen = {} if backend is None else {"PRUNED_RNNT_BACKEND": backend}
        self.environment = {**os.environ, **chosen}
        self.process: subprocess.Popen[str] | None = None

    def run(self, number: int) -> Outcome:
        # A process that an earlier cell has broken may end before it begins this one.
        for _ in range(2):
            found = self._answer(number)
            if found is not None:
                return found
        return Outcome(CRASH, "no process begins the cell")

    def _answer(self, number: int) -> Outcome | None:
        """The outcome of a cell; None if the process ends before it begins."""
        process = self.process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(_SECONDS, process.kill)
        timer.start()
        has_begun = False
        try:
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
            for line in process.stdout:
                _, status, detail = json.loads(line)
                if status is not None:
                    return Outcome(status, detail)
                has_begun = True
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        code = process.wait()
        self.process = None
        return Outcome(CRASH, f"the process ended with code {code}") if has_begun else None

    def _start(self) -> subprocess.Popen[str]:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cells.worker", *self.arguments],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        return self.process

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait()


def run(
    numbers: Sequence[int], device: str = "cpu", table: str = TABLE, *, backend: str | None = None
) -> dict[int, Outcome]:
    """The outcome of each cell of a module's cells(), by its number; with PRUNED_RNNT_BACKEND set
    to `backend`, unless that is None."""
    workers = min(_MOST_WORKERS, os.cpu_count() or 1, len(numbers))
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in numbers:
        waiting.put(number)
    outcomes: dict[int, Outcome] = {}

    def work() -> None:
        worker = _Worker(device, table, backend=backend)
        while True:
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                break
            outcomes[number] = worker.run(number)
        worker.close()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes
