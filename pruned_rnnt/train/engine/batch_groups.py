"""The batches of each step, and the end of training when a data worker dies."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from pruned_rnnt.data.input.worker_signals import WorkerDiedError, worker_deaths_deferred
from pruned_rnnt.train.engine.bad_steps import TrainingStopped
from pruned_rnnt.train.engine.distributed import Ranks
from pruned_rnnt.train.engine.task import Loader

logger = logging.getLogger(__name__)


class BatchGroups:
    """Gathers the batches of a loader into groups of `accumulate`.

    lost_worker: the reason why a data worker died; empty if none did. With several training
        processes, the last group then holds the batches that were loaded, possibly none, and its
        step must be the last one. With one training process, the error is raised.
    """

    def __init__(self, loader: Loader, accumulate: int, ranks: Ranks) -> None:
        self.loader = loader
        self.accumulate = accumulate
        self.ranks = ranks
        self.lost_worker = ""
        self._reasons: list[str] | None = None

    def watch_workers(self, stack: ExitStack) -> None:
        """Until `stack` closes, raise the error of a dead worker only when its batch is fetched.

        Call it once the workers exist; calls after the first one do nothing.
        """
        if self._reasons is None:
            self._reasons = stack.enter_context(worker_deaths_deferred())
            stack.callback(setattr, self, "_reasons", None)

    def groups(self, batches: Iterator[Any]) -> Iterator[tuple[list[Any], int]]:
        """Yield groups, each with the number of batches of the epoch that it uses up.

        Raises:
            WorkerDiedError: a worker died, and training has one process.
        """
        group: list[Any] = []
        try:
            for batch in batches:
                group.append(batch)
                if len(group) == self.accumulate:
                    yield group, len(group)
                    group = []
        except WorkerDiedError as error:
            self.lost_worker = self.reason(error)
            if self.ranks.world_size == 1:
                raise
            # The other processes load their whole group; the step tells them to stop. The batches
            # that are missing here are left out of the epoch.
            missing = self.accumulate - len(group)
            logger.warning("%s: %d batches are left out", self.lost_worker, missing)
            self.loader.agree_without_fetching(missing)
            yield group, self.accumulate
        else:
            if group:
                yield group, len(group)

    def reason(self, error: WorkerDiedError) -> str:
        """torch's message about the dead worker, or else the one about its missing batch."""
        return (self._reasons[-1] if self._reasons else str(error)).rstrip(". ")


def stopped_without_worker(step: int, reason: str) -> TrainingStopped:
    """The error that ends training after `step` because a worker died; reason: of `BatchGroups`."""
    return TrainingStopped(
        f"training stopped after step {step}: {reason}. The same command continues from the newest "
        "checkpoint; if the system killed the worker to free memory, lower data.num_workers"
    )
