"""A training that is killed (SIGKILL) and restarted several times, at random moments."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from typing import Any

from pruned_rnnt.train.engine.log import read_metrics
from pruned_rnnt.train.experiment import ExperimentConfig
from tests.tiny_corpus import speech_trainer
from tests.train.processes import start

_SECONDS_OF_A_SYNC = 0.02
# Matches a checkpoint that is being written.
_UNFINISHED = ".step-*.tmp"
_SPEEDS = ("per_second", "seconds_per_step")


@dataclass
class Deaths:
    """steps: newest checkpoint at each death. in_writes: deaths that left an unfinished file."""

    steps: list[int]
    in_writes: int = 0


def train_with_slow_disk(config: ExperimentConfig) -> None:
    """Train with a delay in writing checkpoints, so that a kill can happen within a write."""
    sync = os.fsync

    def slow_sync(file: int) -> None:
        time.sleep(_SECONDS_OF_A_SYNC)
        sync(file)

    os.fsync = slow_sync
    speech_trainer(config).run()


def train_through_deaths(config: ExperimentConfig, kills: int, seed: int) -> Deaths:
    """Train to the end with `kills` kills at random steps, half of them within a write."""
    rng = random.Random(seed)
    targets = sorted(rng.randrange(config.train.steps - 2) for _ in range(kills))
    folder = config.folder / "checkpoints"
    deaths = Deaths([])
    for number, target in enumerate(targets):
        process = start(train_with_slow_disk, config)
        try:
            deadline = time.monotonic() + 60
            while _newest(folder) < target:
                assert process.is_alive(), "training ended before it was killed"
                assert time.monotonic() < deadline, "training does not progress"
                time.sleep(0.001)
            if number % 2:
                while not list(folder.glob(_UNFINISHED)):
                    assert time.monotonic() < deadline, "no checkpoint is written"
                time.sleep(rng.uniform(0, _SECONDS_OF_A_SYNC))
            else:
                time.sleep(rng.uniform(0, 0.3))
        finally:
            process.kill()
            process.join()
        assert process.exitcode == -9
        deaths.steps.append(_newest(folder))
        for unfinished in folder.glob(_UNFINISHED):
            deaths.in_writes += 1
            # Deleted to detect the next one; the next process would overwrite it.
            unfinished.unlink()
    process = start(train_with_slow_disk, config)
    process.join(120)
    process.kill()
    assert process.exitcode == 0
    return deaths


def results(config: ExperimentConfig) -> list[dict[str, Any]]:
    """Every line of metrics.jsonl without the values that depend on time."""
    return [
        {key: value for key, value in line.items() if not key.endswith(_SPEEDS)}
        for line in read_metrics(config.folder)
    ]


def _newest(folder: Any) -> int:
    return max((int(path.stem.rpartition("-")[2]) for path in folder.glob("step-*.pt")), default=0)
