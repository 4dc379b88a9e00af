"""Mixes cuts of another corpus into the training cuts, so that a model does not forget it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random
from typing import Any

from lhotse.utils import fastcopy

from pruned_rnnt.data.input.augmentation import derived_seed


class MixedCuts:
    """All cuts of one source in an epoch, and among them cuts of another one by a share.

    Each epoch has its own choice of the other cuts, which depends on the seed and the epoch alone,
    so training resumes exactly. If they do not suffice, they are used again.

    cuts, others: sources of cuts; `set_epoch` of the first and `set_pass` of the second are called
        if they have them.
    share: of the other cuts among all of them, at least 0 and below 1.
    """

    def __init__(
        self, cuts: Iterable[Any], others: Iterable[Any], *, share: float, seed: int
    ) -> None:
        self.cuts = cuts
        self.others = others
        self.others_per_cut = share / (1 - share)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.cuts, "set_epoch"):
            self.cuts.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        others = self._endless_others()
        for index, cut in enumerate(self.cuts):
            yield cut
            due = int((index + 1) * self.others_per_cut) - int(index * self.others_per_cut)
            for _ in range(due):
                yield next(others)

    def _endless_others(self) -> Iterator[Any]:
        """The other cuts in a random order, pass after pass.

        Ids in later passes differ, because the augmentation depends on them.
        """
        passes = 0
        while True:
            name = f"-{passes}" if passes else ""
            found = False
            for cut in self._pass(passes):
                found = True
                yield fastcopy(cut, id=f"{cut.id}{name}") if name else cut
            if not found:
                raise ValueError("data.old_path has no utterances to mix in")
            passes += 1

    def _pass(self, number: int) -> Iterable[Any]:
        if hasattr(self.others, "set_pass"):  # streamed; the order of the shards is random
            self.others.set_pass(self.epoch, number)
            return self.others
        cuts = list(self.others)
        Random(derived_seed("old data", self.seed, self.epoch, number)).shuffle(cuts)
        return cuts
