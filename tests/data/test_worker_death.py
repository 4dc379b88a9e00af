"""The death of a worker that holds a lock of all workers is reported."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.input.worker_signals import (
    WorkerDiedError,
    WorkersDoneEvent,
    worker_deaths_deferred,
)
from tests.data.spoken_corpus import make_corpus


@pytest.mark.slow
def test_worker_that_dies_with_the_lock_of_all_workers_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = make_corpus(tmp_path / "corpus", 40)
    config = DataConfig(path=str(corpus), max_duration=12.0, num_workers=2)
    shared = []

    class Recorded(WorkersDoneEvent):
        def __init__(self, event: Any) -> None:
            super().__init__(event)
            shared.append(event)

    monkeypatch.setattr("pruned_rnnt.data.input.loader.WorkersDoneEvent", Recorded)
    others = set(multiprocessing.active_children())
    batches = iter(DataModule(config).train_loader())
    with worker_deaths_deferred():
        # Nobody releases it, as after the death of its holder.
        shared[0]._cond.acquire()
        dying, _ = set(multiprocessing.active_children()) - others
        assert dying.pid is not None
        os.kill(dying.pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=r"is killed by signal|exited unexpectedly"):
            list(batches)
    del batches
    gc.collect()
    assert set(multiprocessing.active_children()) <= others
