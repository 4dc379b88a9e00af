"""Iterates over batches, and can resume in the middle of an epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from lhotse import CutSet
from torch import distributed
from torch.utils.data import DataLoader, Sampler

from pruned_rnnt.data.input.batch import Batch, OtherBatchesError, check_seed_and_processes
from pruned_rnnt.data.input.speech_dataset import SpeechDataset
from pruned_rnnt.data.input.worker_signals import (
    WorkersDoneEvent,
    ignore_job_signals,
    sigterm_blocked,
    worker_deaths_named,
)
from pruned_rnnt.system.allocator import leave_inherited_garbage

logger = logging.getLogger(__name__)


class BatchLoader:
    """Iterates over the batches of one epoch, and can resume in the middle of it.

        loader.set_epoch(epoch)
        for batch in loader: ...

    To resume exactly, save `state_dict(consumed)` with the number of batches of this epoch that
    the training loop has used. Before iterating, load it with `load_state_dict` into a loader of
    the same data, seed and world size.

    Utterances that cannot be read are logged with their names, and counted in `left_out`.
    """

    def __init__(
        self,
        sampler: Any,
        dataset: SpeechDataset,
        *,
        num_workers: int,
        prefetch_factor: int,
        world_size: int,
        all_true: Callable[[bool], bool] | None = None,
        utterances: int | None = None,
        own_ids: frozenset[str] | None = None,
    ) -> None:
        """sampler: yields the cuts of this process's batches; needs `seek` to load states.
        all_true: a collective operation that returns True if the argument is True in all processes.
            Before each batch the processes check with it that all have one, so that an epoch ends
            in all processes when it ends in one. None if they have the same number of batches.
        utterances: utterances in an epoch, over all processes, if known.
        own_ids: ids of the data; others are those that the sampler gave to repeated utterances.
            None if there are none.
        """
        self._own_ids = own_ids
        self.utterances = utterances
        self.sampler = sampler
        self.dataset = dataset
        self.world_size = world_size
        self.left_out = 0
        self._divides_lines = all_true is not None
        self._epoch_sampler = _EpochSampler(sampler, all_true)
        self._loader: DataLoader[Batch] = DataLoader(
            dataset,
            sampler=self._epoch_sampler,
            batch_size=None,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor if num_workers > 0 else None,
            worker_init_fn=ignore_job_signals,
            pin_memory=torch.cuda.is_available(),
        )

    @property
    def epoch(self) -> int:
        return int(self.sampler.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Selects the order and the augmentation of the next iteration.

        Setting the epoch of a loaded state keeps the position in that epoch.
        """
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Batch]:
        leave_inherited_garbage()
        # Start the workers now, not with the first batch, because starting them uses random state.
        with sigterm_blocked():
            batches = iter(self._loader)
        if self._loader.num_workers > 0:
            workers: Any = batches
            workers._workers_done_event = WorkersDoneEvent(workers._workers_done_event)
        return self._with_reports(batches)

    def _with_reports(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in _with_plain_errors(batches):
            for line in batch.left_out:
                self.left_out += 1
                logger.warning("bad audio, skipped (number %d): %s", self.left_out, line)
            if self._own_ids is not None:
                batch = replace(batch, repeats=frozenset(batch.ids) - self._own_ids)
            if len(batch) > 0:
                yield batch

    def agree_without_fetching(self, batches: int) -> None:
        """Takes part in the collective operations of fetching `batches` batches, without fetching.

        For a process that has lost a worker, while the other processes still fetch batches.
        """
        for _ in range(batches):
            self._epoch_sampler.agree_without_fetching()

    def state_dict(self, consumed_batches: int) -> dict[str, Any]:
        """The state after `consumed_batches` batches of the current epoch.

        The caller has to count them, because the sampler is ahead by the batches that workers
        fetch in advance.
        """
        if consumed_batches < 0:
            raise ValueError(f"consumed_batches must not be negative, got {consumed_batches}")
        return {
            "epoch": self.epoch,
            "batches": consumed_batches,
            "digest": self.sampler.digest(consumed_batches),
            "seed": self.sampler.seed,
            "world_size": self.world_size,
            "duration_bins": self.sampler.duration_bins,
            "full_batches": True,
            "divided_lines": True,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes after the batches of `state`.

        The batches before are sampled again, but not read. Raises ValueError if the seed or the
        world size differ, and OtherBatchesError if these batches are not those of the state, which
        has no digest of them in checkpoints of earlier versions. Versions that divided streamed
        data among processes in another way had other batches.
        """
        check_seed_and_processes(state, self.sampler.seed, self.world_size, "data")
        self.sampler.use_bins(state.get("duration_bins"))
        self.sampler.small_batches_epoch = None if "full_batches" in state else state["epoch"]
        is_older = self._divides_lines and state["batches"] > 0 and "divided_lines" not in state
        # A digest that no batches have: what the batches of these versions were is not known.
        digest = "unknown" if is_older else state.get("digest")
        try:
            self.sampler.seek(state["epoch"], state["batches"], digest)
        except OtherBatchesError as error:
            if not is_older:
                raise
            raise OtherBatchesError(
                f"cannot resume after batch {state['batches']} of epoch {state['epoch']}: the "
                "checkpoint is of a version that divided streamed data among processes in another "
                "way; finish the epoch with that version",
                error.batches,
            ) from error


def _with_plain_errors(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Raises a worker's ValueError with its message only, without the traceback that torch adds.

    Raises WorkerDiedError if a worker has died.
    """
    try:
        with worker_deaths_named():
            yield from batches
    except ValueError as error:
        _, worker, message = str(error).strip().rpartition("\nValueError: ")
        if not worker:
            raise
        raise ValueError(message) from error


class _EpochSampler(Sampler[Any]):
    """Adds the epoch number, which workers need, to each batch of cuts."""

    def __init__(self, sampler: Any, all_true: Callable[[bool], bool] | None) -> None:
        self.sampler = sampler
        self.all_true = all_true
        self._ended = False

    def __iter__(self) -> Iterator[tuple[int, CutSet]]:
        self._ended = False
        for cuts in self.sampler:
            if self.all_true is not None and not self.all_true(True):
                self._ended = True
                return
            yield self.sampler.epoch, cuts
        self._ended = True
        if self.all_true is not None:
            self.all_true(False)

    def agree_without_fetching(self) -> None:
        """Takes part in the collective operation of one more batch."""
        if self.all_true is not None and not self._ended:
            self._ended = not self.all_true(True)


def true_on_all_ranks(own: bool) -> bool:
    """True if `own` is true in every process; a collective operation.

    Raises ValueError if torch.distributed is not initialised.
    """
    if not distributed.is_initialized():
        raise ValueError("reading shards in several processes needs torch.distributed initialised")
    count = torch.tensor(int(own))
    distributed.all_reduce(count)
    having, processes = int(count), distributed.get_world_size()
    if 0 < having < processes:
        logger.info("the epoch ends with batches left in %d of %d processes", having, processes)
    return having == processes
