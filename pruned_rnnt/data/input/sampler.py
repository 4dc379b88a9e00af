"""Samples batches with lhotse's bucketing by duration, with a bound on the lattice.

At the end of an epoch, every bucket has cuts left that do not fill a batch. lhotse makes a small
batch of each bucket, of a size that no other batch has, for which a GPU would capture a CUDA graph
of its own. So cuts that are left are joined to full batches over the bounds of buckets.

The memory of a batch grows with its padded lattice: utterances x most encoder frames x (most
symbols + 1). One long text among short ones multiplies it. A batch that exceeds the bound is
therefore split, with utterances of similar text length together. (A `SamplingConstraint` of
lhotse's would end a batch at the first long text instead, and make more batches.)
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from lhotse import CutSet
from lhotse.dataset import DynamicBucketingSampler
from lhotse.dataset.sampling.base import TimeConstraint
from lhotse.dataset.sampling.dynamic import DurationBatcher
from lhotse.dataset.sampling.dynamic_bucketing import estimate_duration_buckets

from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.data.input.augmentation import derived_seed
from pruned_rnnt.data.input.batch import OtherBatchesError
from pruned_rnnt.data.input.filters import CutFilter, cut_text
from pruned_rnnt.data.input.manifest_items import (
    ManifestLine,
    item_of,
    manifest_items,
    spread_lines,
    text_lines,
)

logger = logging.getLogger(__name__)

# lhotse's resampling takes seconds if rate and speed have a small common divisor, such as 22,050 Hz
# and 0.95. At 16 kHz a speed of two decimals needs at most this many phases.
_MOST_PHASES = 100
# The part of the largest duration from which on a batch counts as full.
_FULL = 0.8


class LatticeSize:
    """Computes (encoder frames, symbols + 1) of a cut.

    stretch: largest factor by which augmentation extends the duration.
    """

    def __init__(
        self, count_symbols: Callable[[Any], int], subsampling_factor: int, stretch: float = 1.0
    ) -> None:
        self.count_symbols = count_symbols
        self.subsampling_factor = subsampling_factor
        self.stretch = stretch

    def __call__(self, cut: Any) -> tuple[int, int]:
        return self.frames(cut.duration), self.count_symbols(cut) + 1

    def frames(self, seconds: float) -> int:
        """Number of encoder frames."""
        return -(-round(seconds * 100 * self.stretch) // self.subsampling_factor)

    def nodes(self, cut: Any) -> int:
        """Number of lattice nodes of the cut alone."""
        frames, symbols = self(cut)
        return frames * symbols


class LatticeBound(NamedTuple):
    """size: of a cut's lattice. most: nodes of the padded lattice of a batch."""

    size: LatticeSize
    most: int

    def is_exceeded_by(self, cut: Any, symbols: int) -> bool:
        """Whether the cut alone, with so many symbols, has more nodes."""
        return self.size.frames(cut.duration) * (symbols + 1) > self.most


def split_by_lattice(sizes: Sequence[tuple[int, int]], bound: int) -> list[list[int]]:
    """Groups the indices of `sizes`, (frames, symbols + 1) pairs, by similar text length.

    The padded lattice of a group does not exceed `bound`, unless a single utterance does; that one
    is a group of its own.
    """
    order = sorted(range(len(sizes)), key=lambda index: (sizes[index][1], sizes[index][0], index))
    groups: list[list[int]] = []
    longest = most = 0
    for index in reversed(order):
        frames, symbols = sizes[index]
        group = groups[-1] if groups else []
        longest, most = max(longest, frames), max(most, symbols)
        if group and (len(group) + 1) * longest * most <= bound:
            group.append(index)
        else:
            groups.append([index])
            longest, most = frames, symbols
    return groups


class _WatchedCuts:
    """Iterates over cuts, and knows whether all have been read."""

    def __init__(self, cuts: Iterable[Any]) -> None:
        self._cuts = cuts
        self.all_read = False

    def __iter__(self) -> Iterator[Any]:
        self.all_read = False
        yield from self._cuts
        self.all_read = True


class BatchSampler(DynamicBucketingSampler):  # type: ignore[misc]
    """lhotse's sampler with full batches and a bound on the lattice; resumes after some batches.

    source: cuts; its `set_epoch`, if it has one, is called with each epoch.
    max_duration, max_cuts: of a batch.
    first_bins: gives the duration_bins of versions that saved none; see `use_bins`.
    lattice_bound: None for none.
    The other arguments are lhotse's.
    """

    def __init__(
        self,
        source: Iterable[Any],
        *,
        max_duration: float | None = None,
        max_cuts: int | None = None,
        lattice_bound: LatticeBound | None = None,
        first_bins: Callable[[], list[float]] | None = None,
        **options: Any,
    ) -> None:
        self._watched = _WatchedCuts(source)
        super().__init__(self._watched, max_duration=max_duration, max_cuts=max_cuts, **options)
        self._size = TimeConstraint(max_duration=max_duration, max_cuts=max_cuts)
        self.source = source
        # An epoch that began with a version that left the last batches of buckets as they were.
        self.small_batches_epoch: int | None = None
        # Batches of the end of an epoch, still to be returned.
        self._last: deque[CutSet] = deque()
        self.lattice_bound = lattice_bound
        self.first_bins = first_bins
        # Parts of a batch that was split, still to be returned.
        self._parts: deque[CutSet] = deque()
        # One after each batch of the epoch; workers fetch more batches than training has used.
        self._digests: list[str] = [""]

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self._digests = [""]
        super().set_epoch(epoch)
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)

    def __iter__(self) -> BatchSampler:
        if not self._just_restored_state:
            self._parts.clear()
            self._last.clear()
            self._digests = [""]
        super().__iter__()
        return self

    def __next__(self) -> CutSet:
        batch = super().__next__()
        known = [(cut.id, cut.duration, cut_text(cut)) for cut in batch]
        digest = hashlib.sha256(f"{self._digests[-1]}{known}".encode())
        self._digests.append(digest.hexdigest()[:32])
        return batch

    def digest(self, batches: int) -> str | None:
        """Of the ids, durations and texts in the first `batches` batches that this process got.

        None if it has got fewer.
        """
        return self._digests[batches] if batches < len(self._digests) else None

    def use_bins(self, saved: list[float] | None) -> None:
        """Takes the bounds between buckets of the run that is continued; None if it saved none."""
        if saved is not None:
            self.duration_bins = saved
        elif self.first_bins is not None:
            self.duration_bins = self.first_bins()

    def seek(self, epoch: int, batches: int, digest: str | None = None) -> None:
        """Makes the next iteration start after `batches` batches of `epoch`.

        digest: of these batches; None if it is not known.

        Raises OtherBatchesError if the batches have another digest, or the epoch has fewer: the
        next iteration is then empty.
        """
        self.allow_iter_to_reset_state()
        self.set_epoch(epoch)
        made = sum(1 for _ in islice(self, batches))
        self._just_restored_state = True
        if made < batches:
            change = f"give only {made}"
        elif digest not in (None, self.digest(batches)):
            change = "have other utterances, durations or texts in them"
        else:
            return
        raise OtherBatchesError(
            f"cannot resume after batch {batches} of epoch {epoch}: the data now {change}; use "
            "the data that the run began with",
            made,
        )

    def _next_batch(self) -> CutSet:
        if not self._parts:
            batch = self._full_batch()
            if self.lattice_bound is None:
                return batch
            cuts = list(batch)
            size, most = self.lattice_bound
            groups = split_by_lattice([size(cut) for cut in cuts], most)
            # The filter has already removed utterances that exceed the bound alone.
            self._parts.extend(CutSet.from_cuts(cuts[i] for i in group) for group in groups)
        return self._parts.popleft()

    def _full_batch(self) -> CutSet:
        """The next batch without regard to lattices."""
        if self._last:
            return self._last.popleft()
        batch = super()._next_batch()
        if not self._watched.all_read or self.epoch == self.small_batches_epoch:
            return batch
        if self._is_full(batch):
            return batch
        # lhotse returns what is left in buckets after all full batches.
        left = list(batch)
        with suppress(StopIteration):
            while True:
                batch = super()._next_batch()
                if self._is_full(batch):
                    self._last.append(batch)
                else:
                    left += batch
        left.sort(key=lambda cut: (-cut.duration, cut.id))
        joined = list(DurationBatcher(left, constraint=self._size.copy()))
        self.rng.shuffle(joined)
        self._last.extend(joined)
        return self._last.popleft()

    def _is_full(self, batch: CutSet) -> bool:
        size = self._size.copy()
        for cut in batch:
            size.add(cut)
        if size.close_to_exceeding():
            return True
        # What is left in a bucket may nearly fill a batch.
        padded = size.num_cuts * size.longest_seen
        return self.max_duration is not None and bool(padded >= _FULL * self.max_duration)


def duration_bins(cuts: Iterable[Any], buckets: int) -> list[float]:
    """Bounds in seconds between buckets of equal total duration, as lhotse estimates them.

    Fewer buckets for few cuts, but at least one bound, which lhotse needs.
    """
    first = list(cuts)
    buckets = min(buckets, len(first) // 2)
    if buckets < 2:
        return [max((cut.duration for cut in first), default=1.0)]
    bounds = [float(bound) for bound in estimate_duration_buckets(first, num_buckets=buckets)]
    return bounds or [first[0].duration]


def at_speed(cut: Any, speed: float) -> Any:
    """A copy of the cut at another speed, without features, and perhaps at 16 kHz."""
    # lhotse warns about every cut with features, which speed perturbation discards.
    cut, rate = cut.drop_features(), cut.sampling_rate
    if speed_phases(rate, speed) > _MOST_PHASES:
        cut = cut.resample(SAMPLING_RATE)
    return cut.perturb_speed(speed)


def speed_phases(rate: int, speed: float) -> int:
    """The number of filters of lhotse's resampling to this speed, which grows with its time."""
    return rate // math.gcd(round(rate * speed), rate)


class ManifestShards:
    """Streams the cuts of one process in one epoch from the manifests of shards.

    Every epoch has its own order of shards. All processes read all shards, and each parses one of
    every `world_size` lines. So they have as many cuts, and cuts of the same kinds: whole shards
    may differ in their durations, and an epoch ends in all processes when it ends in one.

    cut_filter: selects the cuts to train on. transform: applied to each cut that is read.
    speeds: adds a copy of each cut at each of these speeds.
    allow_commands: as in `manifest_items`.
    """

    def __init__(
        self,
        manifests: Sequence[Path],
        *,
        transform: Callable[[Any], Any],
        cut_filter: CutFilter,
        speeds: Sequence[float],
        seed: int,
        rank: int,
        world_size: int,
        allow_commands: bool = False,
    ) -> None:
        self.manifests = list(manifests)
        self.allow_commands = allow_commands
        self.transform = transform
        self.cut_filter = cut_filter
        self.speeds = [speed for speed in speeds if speed != 1.0]
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.passes = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.passes = epoch, 0

    def set_pass(self, epoch: int, passes: int) -> None:
        """For data that are mixed into others: the pass (from 0) over them in an epoch."""
        self.epoch, self.passes = epoch, passes

    def __iter__(self) -> Iterator[Any]:
        self.cut_filter.reset()
        order = list(self.manifests)
        again = (self.passes,) if self.passes else ()
        rng = Random(derived_seed("shards", self.seed, self.epoch, *again))
        rng.shuffle(order)
        lines = (ManifestLine(path, *line) for path in order for line in text_lines(path))
        while block := list(islice(lines, self.world_size)):
            # At random, because lines may alternate, between speeds or channels.
            place = (self.rank + rng.randrange(self.world_size)) % self.world_size
            if place < len(block):
                yield from self._training_cuts(item_of(block[place], self.allow_commands))
        note = f", pass {self.passes + 1}" if self.passes else ""
        logger.info("epoch %d%s, left out: %s", self.epoch, note, self.cut_filter.describe())

    def spread(self, most: int) -> Iterator[Any]:
        """Cuts at equal distances over all shards, the same in every process and epoch.

        They come from up to twice `most` lines of the manifests, or from all if they are fewer.
        """
        for line in spread_lines(self.manifests, most):
            yield from self._training_cuts(item_of(line, self.allow_commands))

    def from_first_shard(self) -> Iterator[Any]:
        """All cuts from the first shard on, the same in every process and epoch."""
        for manifest in self.manifests:
            for _, cut in manifest_items(manifest, self.allow_commands):
                yield from self._training_cuts(cut)

    def _training_cuts(self, cut: Any) -> Iterator[Any]:
        """The cut and its copies at other speeds, unless they are left out."""
        cut = self.transform(cut)
        copies = [cut, *(at_speed(cut, speed) for speed in self.speeds)]
        yield from (copy for copy in copies if self.cut_filter(copy))
