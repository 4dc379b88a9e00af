"""From a prepared folder to batches: sampling by duration, augmentation, worker processes.

The sampler lives in the training process and hands cuts to the workers with the number of the
epoch, so batches depend on (seed, epoch, world size) alone, never on the number of workers.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lhotse import CutSet
from lhotse.dataset import DynamicBucketingSampler, DynamicCutSampler

from pruned_rnnt.data.augmentation import AugmentationConfig, FeatureAugmenter
from pruned_rnnt.data.cuts_to_batch import CutsToBatch
from pruned_rnnt.data.filters import CutFilter, FilterConfig, filter_cuts
from pruned_rnnt.data.loader import BatchLoader
from pruned_rnnt.data.prepared import PreparedFolder


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which data, and how it becomes batches.

    path: prepared folder (see `prepared.py`).
    train, valid: names of the splits to train on and to validate with.
    features: "stored" reads what prepare computed; "waveform" computes features from the
        recordings each time, which allows `speed_factors`.
    speed_factors: with "waveform", every training utterance is also heard at these speeds.
    max_duration: seconds of speech in a training batch, padding not counted.
    max_cuts: most utterances in a batch; 0 for no bound.
    valid_max_duration: the same bound for validation and decoding batches.
    num_buckets: utterances of similar duration are batched together, in this many groups.
    buffer_size: cuts held for bucketing and shuffling.
    lazy: read the training manifest while training instead of holding it in memory.
    num_workers, prefetch_factor: worker processes, and batches each prepares ahead. With 0 the
        training process does the work itself.
    seed: of the order of the batches and of all augmentation.
    """

    path: str = "data/synthetic"
    train: str = "train"
    valid: str = "dev"
    features: Literal["stored", "waveform"] = "stored"
    speed_factors: tuple[float, ...] = ()
    max_duration: float = 60.0
    max_cuts: int = 0
    valid_max_duration: float = 120.0
    num_buckets: int = 10
    buffer_size: int = 20000
    lazy: bool = False
    num_workers: int = 1
    prefetch_factor: int = 4
    seed: int = 42
    filters: FilterConfig = field(default_factory=FilterConfig)
    augmentation: AugmentationConfig = field(default_factory=AugmentationConfig)

    def __post_init__(self) -> None:
        if self.speed_factors and self.features == "stored":
            raise ValueError(
                "speed_factors need features=waveform: stored features have the speeds that "
                f"prepare gave them; got speed_factors={list(self.speed_factors)}"
            )
        if self.max_duration <= 0:
            raise ValueError(f"max_duration must be positive seconds, got {self.max_duration}")


class DataModule:
    """Tokenizer and batch loaders of one prepared folder, for one rank of `world_size`."""

    def __init__(self, config: DataConfig, *, rank: int = 0, world_size: int = 1) -> None:
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.folder = PreparedFolder(Path(config.path))
        self.tokenizer = self.folder.tokenizer()

    def train_loader(self) -> BatchLoader:
        """Shuffled, bucketed, filtered and augmented batches of the training split.

        An epoch has the same number of batches on every rank.
        """
        config = self.config
        cut_filter = CutFilter(config.filters, self.tokenizer)
        cuts = self.folder.cuts(config.train, lazy=config.lazy)
        cuts = _with_speeds(cuts, config.speed_factors)
        if config.lazy:
            cuts = cuts.filter(cut_filter)
        else:
            cuts = filter_cuts(cuts, cut_filter, config.train)
            if len(cuts) == 0:
                raise ValueError(
                    f"no training cuts are left of {self.folder.cuts_path(config.train)}: "
                    f"{cut_filter.describe()}"
                )
        with warnings.catch_warnings():
            # A small corpus is better held in memory, whatever the sampler says about it.
            warnings.filterwarnings("ignore", message=".*eagerly read CutSet.*")
            sampler = DynamicBucketingSampler(
                cuts,
                max_duration=config.max_duration,
                max_cuts=config.max_cuts or None,
                num_buckets=config.num_buckets if config.lazy else _buckets(config, len(cuts)),
                buffer_size=config.buffer_size,
                shuffle=True,
                drop_last=False,
                seed=config.seed,
                rank=self.rank,
                world_size=self.world_size,
            )
        augmenter = FeatureAugmenter(config.augmentation, seed=config.seed)
        return self._loader(sampler, augmenter)

    def valid_loader(self) -> BatchLoader:
        """Batches of the validation split: every utterance, in a fixed order, as it is."""
        return self.test_loader(self.config.valid)

    def test_loader(self, split: str = "test") -> BatchLoader:
        """Batches of any split: every utterance, longest first, neither filtered nor augmented.

        With several ranks the last batch may repeat utterances so that each rank has one; their
        ids end in `_dup0`.
        """
        cuts = self.folder.cuts(split).sort_by_duration()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*eagerly read CutSet.*")
            sampler = DynamicCutSampler(
                cuts,
                max_duration=self.config.valid_max_duration,
                shuffle=False,
                drop_last=False,
                rank=self.rank,
                world_size=self.world_size,
            )
        return self._loader(sampler, None)

    def _loader(self, sampler: Any, augmenter: FeatureAugmenter | None) -> BatchLoader:
        config = self.config
        stored = config.features == "stored"
        dataset = CutsToBatch(self.tokenizer, stored=stored, augmenter=augmenter)
        return BatchLoader(sampler, dataset, config.num_workers, config.prefetch_factor)


def _with_speeds(cuts: CutSet, factors: tuple[float, ...]) -> CutSet:
    copies = [cuts.perturb_speed(factor) for factor in factors if factor != 1.0]
    for copy_of_cuts in copies:
        cuts = cuts + copy_of_cuts
    return cuts


def _buckets(config: DataConfig, cuts: int) -> int:
    """No more buckets than there are cuts to tell them apart."""
    return max(1, min(config.num_buckets, cuts // 2))
