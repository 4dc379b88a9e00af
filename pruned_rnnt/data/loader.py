"""Iterating over batches, and continuing in the middle of an epoch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from lhotse import CutSet
from torch.utils.data import DataLoader, Sampler

from pruned_rnnt.data.batch import Batch
from pruned_rnnt.data.cuts_to_batch import CutsToBatch


class BatchLoader:
    """Iterates over the batches of one epoch; knows how to continue in the middle of one.

        loader.set_epoch(epoch)
        for batch in loader: ...

    To resume exactly, save `state_dict(consumed)` with the number of batches of this epoch the
    training loop really used, and `load_state_dict` it into a loader made from the same data,
    seed and world size before iterating.
    """

    def __init__(
        self, sampler: Any, dataset: CutsToBatch, num_workers: int, prefetch_factor: int
    ) -> None:
        self.sampler = sampler
        self.dataset = dataset
        self._loader: DataLoader[Batch] = DataLoader(
            dataset,
            sampler=_EpochSampler(sampler),
            batch_size=None,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor if num_workers > 0 else None,
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
        return iter(self._loader)

    def state_dict(self, consumed_batches: int) -> dict[str, Any]:
        """State after `consumed_batches` batches since the beginning of the current epoch.

        The sampler itself is ahead of training by what the workers fetch in advance; its count is
        therefore replaced by the caller's.
        """
        if consumed_batches < 0:
            raise ValueError(f"consumed_batches must not be negative, got {consumed_batches}")
        state: dict[str, Any] = copy.deepcopy(self.sampler.state_dict())
        state["diagnostics"]["stats_per_epoch"] = {
            self.epoch: {
                "epoch": self.epoch,
                "kept_cuts": 0,
                "discarded_cuts": 0,
                "kept_batches": consumed_batches,
                "discarded_batches": 0,
            }
        }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after the batches of `state`; the next iteration yields the one after them.

        Raises ValueError when the seed or the world size differ.
        """
        for key, own in (("seed", self.sampler.seed), ("world_size", self.sampler.world_size)):
            if state[key] != own:
                raise ValueError(
                    f"cannot resume the data with {key} {own}: the saved state has {state[key]}"
                )
        # lhotse empties the dictionary it loads from.
        self.sampler.load_state_dict(copy.deepcopy(state))


class _EpochSampler(Sampler[Any]):
    """Adds the number of the epoch to each batch of cuts, for workers that cannot know it."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[tuple[int, CutSet]]:
        for cuts in self.sampler:
            yield self.sampler.epoch, cuts
