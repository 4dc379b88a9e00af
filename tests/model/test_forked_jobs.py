"""Jobs in forked processes: shared out, watched, and killed where they are stuck."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pruned_rnnt.model.kernels import forked_jobs
from pruned_rnnt.model.kernels.forked_jobs import run_forked


def write(path: Path) -> None:
    path.write_text(str(os.getpid()))


def test_processes_share_the_jobs(tmp_path: Path) -> None:
    jobs = [partial(write, tmp_path / str(n)) for n in range(40)]
    shown: list[int] = []
    run_forked(jobs, 3, shown.append)
    numbers = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(numbers) == 40
    assert os.getpid() not in numbers
    assert len(set(numbers)) <= 3
    assert shown[-1] == 40
    assert shown == sorted(shown)
    with pytest.raises(ChildProcessError):
        os.waitpid(numbers[0], 0)


def test_failures_and_ends_of_a_process_leave_the_others(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError

    jobs: list[Callable[[], object]] = [fail, partial(os._exit, 3)]
    jobs += [partial(write, tmp_path / str(n)) for n in range(9)]
    run_forked(jobs, 2, lambda count: None)
    assert len(list(tmp_path.iterdir())) == 9


def test_stuck_processes_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that another thread holds when the process is forked is never released there."""
    monkeypatch.setattr(forked_jobs, "_MOST_SECONDS", 1)
    lock, is_held, end = threading.Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    started = time.monotonic()
    run_forked([lock.acquire] * 3, 2, lambda count: None)
    end.set()
    thread.join()
    assert 1 <= time.monotonic() - started < 60


@pytest.mark.parametrize("obstacle", ["descriptors", "processes", "children are reaped"])
def test_without_processes_jobs_do_not_run(
    obstacle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise OSError(errno.EAGAIN, "no more")

    if obstacle == "children are reaped":
        before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    else:
        monkeypatch.setattr(os, "pipe" if obstacle == "descriptors" else "fork", refuse)
    opened = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    run_forked([partial(write, tmp_path / "a")], 2, lambda count: None)
    assert len(os.listdir("/proc/self/fd")) == opened  # noqa: PTH208
    assert (tmp_path / "a").exists() == (obstacle == "children are reaped")
    if obstacle == "children are reaped":
        signal.signal(signal.SIGCHLD, before)


def test_processes_end_after_their_parent(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, time; from pathlib import Path\n"
        "from pruned_rnnt.model.kernels.forked_jobs import run_forked\n"
        "def job(n):\n"
        "    time.sleep(0.1); Path(sys.argv[1], str(n)).touch()\n"
        "def show(count):\n"
        "    if count > 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "run_forked([lambda n=n: job(n) for n in range(200)], 2, show)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE)
    # Standard output ends with the last process.
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) < 20
