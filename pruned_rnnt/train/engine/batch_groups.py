"""The batches of each step, and the end of training when a process that loads them is gone."""

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

    lost_worker: what is known about a worker that died; empty as long as none did. In a training of
        several processes the last group is then as long as it could be, maybe empty, and the step
        that is made of it has to be the last one. In a training of one process the error is raised.
    """

    def __init__(self, loader: Loader, accumulate: int, ranks: Ranks) -> None:
        self.loader = loader
        self.accumulate = accumulate
        self.ranks = ranks
        self.lost_worker = ""
        self._reasons: list[str] | None = None

    def watch_workers(self, stack: ExitStack) -> None:
        """Until `stack` is closed, the death of a worker shows where its batch is waited for.

        To be called when there are workers; the first call counts.
        """
        if self._reasons is None:
            self._reasons = stack.enter_context(worker_deaths_deferred())
            stack.callback(setattr, self, "_reasons", None)

    def groups(self, batches: Iterator[Any]) -> Iterator[tuple[list[Any], int]]:
        """Groups, and how many batches of the epoch each of them takes.

        Raises:
            WorkerDiedError: training has one process.
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
            # The other processes fetch all of their batches and make a step, in which they learn of
            # it: what was not fetched here is left out of this epoch.
            missing = self.accumulate - len(group)
            logger.warning("%s: %d batches are left out", self.lost_worker, missing)
            self.loader.agree_without_fetching(missing)
            yield group, self.accumulate
        else:
            if group:
                yield group, len(group)

    def reason(self, error: WorkerDiedError) -> str:
        """What torch said when the worker died, or else when its batch did not come."""
        return (self._reasons[-1] if self._reasons else str(error)).rstrip(". ")


def stopped_without_worker(step: int, reason: str) -> TrainingStopped:
    """The end of training after `step` because a worker is gone; reason: of `BatchGroups`."""
    return TrainingStopped(
        f"training stopped after step {step}: {reason}. The same command continues from the newest "
        "checkpoint; if the system killed the worker to free memory, lower data.num_workers"
    )
