"""Iterating over batches, and continuing in the middle of an epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lhotse import CutSet
from torch import distributed
from torch.utils.data import DataLoader, Sampler

from pruned_rnnt.data.input.batch import Batch
from pruned_rnnt.data.input.speech_dataset import CutsToBatch
from pruned_rnnt.data.input.worker_signals import (
    WorkerDiedError,
    leave_signals_to_the_parent,
    sigterm_waits,
)

logger = logging.getLogger(__name__)


class BatchLoader:
    """Iterates over the batches of one epoch; knows how to continue in the middle of one.

        loader.set_epoch(epoch)
        for batch in loader: ...

    To resume exactly, save `state_dict(consumed)` with the number of batches of this epoch the
    training loop really used, and `load_state_dict` it into a loader made from the same data,
    seed and world size before iterating.

    Utterances that could not be read are logged by name, and counted in `left_out`.
    """

    def __init__(
        self,
        sampler: Any,
        dataset: CutsToBatch,
        *,
        num_workers: int,
        prefetch_factor: int,
        world_size: int,
        agree: Callable[[bool], bool] | None = None,
        utterances: int | None = None,
    ) -> None:
        """sampler: of this process's batches; with `go_to` if states are to be loaded.

        agree: whether all processes still have a batch, each asking with its own answer; an epoch
            ends for all when it ends for one. None where they have equally many anyway.
        utterances: of an epoch, over all processes, where it is known.
        """
        self.utterances = utterances
        self.sampler = sampler
        self.dataset = dataset
        self.world_size = world_size
        self.left_out = 0
        self._epoch_sampler = _EpochSampler(sampler, agree)
        self._loader: DataLoader[Batch] = DataLoader(
            dataset,
            sampler=self._epoch_sampler,
            batch_size=None,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor if num_workers > 0 else None,
            worker_init_fn=leave_signals_to_the_parent,
            pin_memory=torch.cuda.is_available(),
        )

    @property
    def epoch(self) -> int:
        return int(self.sampler.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order and the augmentation of the next iteration.

        Setting the epoch that a loaded state belongs to keeps its place in the epoch.
        """
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Batch]:
        # Workers start now, not with the first batch: callers guard their random generators.
        with sigterm_waits():
            batches = iter(self._loader)
        return self._reported(batches)

    def _reported(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in _with_plain_errors(batches):
            for line in batch.left_out:
                self.left_out += 1
                logger.warning("bad audio, left out (number %d): %s", self.left_out, line)
            if len(batch) > 0:
                yield batch

    def keep_pace(self, batches: int) -> None:
        """Agree with the other processes as fetching so many batches does, but fetch none.

        For a process that has lost a worker, while the others fetch once more.
        """
        for _ in range(batches):
            self._epoch_sampler.keep_pace()

    def state_dict(self, consumed_batches: int) -> dict[str, Any]:
        """State after `consumed_batches` batches since the beginning of the current epoch.

        The sampler itself is ahead of training by what the workers fetch in advance, so the
        caller has to count.
        """
        if consumed_batches < 0:
            raise ValueError(f"consumed_batches must not be negative, got {consumed_batches}")
        return {
            "epoch": self.epoch,
            "batches": consumed_batches,
            "seed": self.sampler.seed,
            "world_size": self.world_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after the batches of `state`; the next iteration yields the one after them.

        The batches before are sampled again, without being read. Raises ValueError when the seed
        or the world size differ, or the data have fewer batches.
        """
        for key, own in (("seed", self.sampler.seed), ("world_size", self.world_size)):
            if state[key] != own:
                raise ValueError(
                    f"cannot resume the data with {key} {own}: the saved state has {state[key]}"
                )
        self.sampler.go_to(state["epoch"], state["batches"])


def _with_plain_errors(batches: Iterator[Batch]) -> Iterator[Batch]:
    """A worker's ValueError, which torch wraps into its traceback, with its message alone.

    A worker that is gone is a WorkerDiedError.
    """
    try:
        yield from batches
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        raise WorkerDiedError(str(error).strip()) from error
    except ValueError as error:
        _, worker, message = str(error).strip().rpartition("\nValueError: ")
        if not worker:
            raise
        raise ValueError(message) from error


class _EpochSampler(Sampler[Any]):
    """Adds the number of the epoch to each batch of cuts, for workers that cannot know it."""

    def __init__(self, sampler: Any, agree: Callable[[bool], bool] | None) -> None:
        self.sampler = sampler
        self.agree = agree
        self._ended = False

    def __iter__(self) -> Iterator[tuple[int, CutSet]]:
        self._ended = False
        for cuts in self.sampler:
            if self.agree is not None and not self.agree(True):
                self._ended = True
                return
            yield self.sampler.epoch, cuts
        self._ended = True
        if self.agree is not None:
            self.agree(False)

    def keep_pace(self) -> None:
        """Agree once more, as with the next batch of an epoch that goes on."""
        if self.agree is not None and not self._ended:
            self._ended = not self.agree(True)


def all_processes(own: bool) -> bool:
    """Whether `own` holds in every process; all have to ask.

    Raises ValueError when the processes are not joined to a group.
    """
    if not distributed.is_initialized():
        raise ValueError("shards of several processes need torch.distributed to be initialised")
    answer = torch.tensor(int(own))
    distributed.all_reduce(answer, distributed.ReduceOp.MIN)
    return bool(answer)
