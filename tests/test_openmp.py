"""OpenMP's threads do not spin while other processes are busy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pruned_rnnt
from pruned_rnnt import cli
from pruned_rnnt.pretrained import load
from pruned_rnnt.system import openmp
from pruned_rnnt.system.openmp import sharing_processors
from tests.transcribe.random_model import save_random_model, sound

IDLE = "pruned_rnnt-idle"

pytestmark = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs Linux")


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Processors that other processes use, to be changed; torch has two threads of two."""
    value = [0.0]
    of_session = openmp._WATCH
    active = of_session._contexts > 0
    if active:
        of_session.leave()

    def load() -> openmp._Load:
        now = time.monotonic()
        return openmp._Load(now, now * value[0])

    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(openmp, "_WATCH", openmp._Watch())
    monkeypatch.setattr(openmp, "_QUIET", 0.05)
    monkeypatch.setattr(openmp, "_load", load)
    monkeypatch.setattr(openmp, "_torch_threads", lambda: 2)
    monkeypatch.setattr(openmp.os, "sched_getaffinity", lambda process: {0, 1})
    yield value
    if active:
        of_session.enter()


def test_busy_neighbours_bring_an_idle_team_that_ends_with_the_context(
    others: list[float],
) -> None:
    torch.ones(10**6).add_(1)
    before = _tasks()
    with sharing_processors():
        _wait_until(lambda: openmp._WATCH._before is not None)
        assert not _names() & {IDLE}
        others[0] = 1.0
        _wait_until(lambda: IDLE in _names())
        if openmp._libraries():  # other builds of torch have another OpenMP library
            _wait_until(lambda: len(_tasks() - before) >= 3)  # the watch, and two a team
        with sharing_processors():
            pass
        assert IDLE in _names()
        others[0] = 0.0
        _wait_until(lambda: IDLE not in _names())
        others[0] = 1.0
        _wait_until(lambda: IDLE in _names())
    assert not any(name.startswith("pruned_rnnt") for name in _names())
    _wait_until(lambda: not _tasks() - before)


def test_a_context_begins_with_what_an_earlier_one_has_seen(
    others: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    others[0] = 1.0
    with sharing_processors():
        _wait_until(lambda: IDLE in _names())
    monkeypatch.setattr(openmp, "_INTERVAL", 100.0)  # no second look
    monkeypatch.setattr(openmp._WATCH, "_busy_until", time.monotonic() + 100)
    with sharing_processors():
        _wait_until(lambda: IDLE in _names())


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_the_choice_of_the_user_stays(
    others: list[float], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "7")
    with sharing_processors():
        assert "pruned_rnnt-load" not in _names()


def test_the_load_of_others_excludes_this_process() -> None:
    before = openmp._load()
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass
    after = openmp._load()
    processors = len(openmp.os.sched_getaffinity(0))
    # Ticks of 10 ms, and a thread that moves between two readings of the table.
    assert after.others - before.others > -0.2
    assert after.others - before.others < processors * (after.seconds - before.seconds) - 0.3


def test_load_and_transcribe_watch_the_load(
    others: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []
    loading = load.load

    def watched(*args: Any, **options: Any) -> Any:
        seen.append(openmp._WATCH._contexts)
        return loading(*args, **options)

    monkeypatch.setattr(load, "load", watched)
    recogniser = pruned_rnnt.load(save_random_model(tmp_path))
    recogniser.transcribe(sound(1.0), on_seconds=lambda _: seen.append(openmp._WATCH._contexts))
    assert len(seen) > 1
    assert set(seen) == {1}
    assert openmp._WATCH._contexts == 0


def test_commands_limit_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "")  # restored after the test
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert openmp.os.environ["GOMP_SPINCOUNT"] == "1000"


def _names() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def _tasks() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def _wait_until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)
