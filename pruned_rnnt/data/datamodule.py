"""From a prepared folder to batches: sampling by duration, augmentation, worker processes.

The sampler lives in the training process and hands cuts to the workers with the number of the
epoch, so batches depend on (seed, epoch, world size) alone, never on the number of workers.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from lhotse import CutSet, Fbank, FbankConfig
from lhotse.dataset import DynamicBucketingSampler, DynamicCutSampler
from lhotse.utils import LOG_EPSILON
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from pruned_rnnt.data.augmentation import AugmentationConfig, FeatureAugmenter, derived_seed
from pruned_rnnt.data.batch import AlignedWord, Batch, pad_features, pad_targets
from pruned_rnnt.data.filters import CutFilter, FilterConfig, cut_text, filter_cuts
from pruned_rnnt.data.prepared import PreparedFolder
from pruned_rnnt.data.tokens import Tokenizer

logger = logging.getLogger(__name__)

SAMPLING_RATE = 16000
FEATURE_DIM = 80


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
        return self._loader(sampler, CutsToBatch(self.tokenizer, config, augment=True))

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
        return self._loader(sampler, CutsToBatch(self.tokenizer, self.config, augment=False))

    def _loader(self, sampler: Any, dataset: CutsToBatch) -> BatchLoader:
        config = self.config
        return BatchLoader(sampler, dataset, config.num_workers, config.prefetch_factor)


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


class CutsToBatch(Dataset[Batch]):
    """Maps (epoch, cuts) to a Batch; runs in the worker processes."""

    def __init__(self, tokenizer: Tokenizer, config: DataConfig, *, augment: bool) -> None:
        self.tokenizer = tokenizer
        self.stored = config.features == "stored"
        self.augmenter = (
            FeatureAugmenter(config.augmentation, seed=config.seed) if augment else None
        )
        self._fbank = None if self.stored else fbank_extractor()
        noise = config.augmentation.noise_cuts if augment else ""
        self._noise_cuts = CutSet.from_file(noise).to_eager() if noise else None

    def __getitem__(self, item: tuple[int, CutSet]) -> Batch:
        epoch, cuts = item
        ordered = sorted(cuts, key=lambda cut: (-cut.duration, cut.id))
        features = [self._features(cut, epoch) for cut in ordered]
        if self.augmenter is not None and self.augmenter.config.tempo > 0:
            order = sorted(range(len(ordered)), key=lambda i: -features[i].shape[0])
            ordered = [ordered[i] for i in order]
            features = [features[i] for i in order]
        features_NTF, feature_lengths_N = pad_features(features, LOG_EPSILON)
        texts = tuple(cut_text(cut) for cut in ordered)
        targets_NU, target_lengths_N = pad_targets([self.tokenizer.encode(t) for t in texts])
        return Batch(
            features_NTF=features_NTF,
            feature_lengths_N=feature_lengths_N,
            targets_NU=targets_NU,
            target_lengths_N=target_lengths_N,
            texts=texts,
            ids=tuple(cut.id for cut in ordered),
            durations=tuple(float(cut.duration) for cut in ordered),
            words=tuple(aligned_words(cut) for cut in ordered),
        )

    def _features(self, cut: Any, epoch: int) -> Tensor:
        if self.augmenter is None:
            return self._load(cut)
        if self._noise_cuts is not None:
            config = self.augmenter.config
            mixed = CutSet.from_cuts([cut]).mix(
                self._noise_cuts,
                snr=config.noise_cuts_snr_db,
                mix_prob=config.noise_cuts_probability,
                preserve_id="left",
                seed=derived_seed(self.augmenter.seed, epoch, cut.id, "noise"),
                random_mix_offset=True,
            )
            return self.augmenter(self._load(mixed[0]), epoch=epoch, cut_id=cut.id)
        return self.augmenter(self._load(cut), epoch=epoch, cut_id=cut.id)

    def _load(self, cut: Any) -> Tensor:
        if self.stored:
            return torch.from_numpy(cut.load_features())
        return torch.from_numpy(self._fbank.extract(cut.load_audio(), cut.sampling_rate))  # type: ignore[union-attr]


def fbank_extractor() -> Fbank:
    """The one feature extractor: lhotse's Fbank defaults at 16 kHz, 80 mel bins (as icefall's)."""
    return Fbank(FbankConfig(sampling_rate=SAMPLING_RATE, num_mel_bins=FEATURE_DIM))


def aligned_words(cut: Any) -> tuple[AlignedWord, ...]:
    """Words with times from the `word` alignments of a cut; empty if there are none."""
    return tuple(
        AlignedWord(
            word=item.symbol,
            start=float(item.start),
            duration=float(item.duration or 0.0),
        )
        for supervision in cut.supervisions
        for item in (supervision.alignment or {}).get("word", ())
    )


class _EpochSampler(Sampler[Any]):
    """Adds the number of the epoch to each batch of cuts, for workers that cannot know it."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[tuple[int, CutSet]]:
        for cuts in self.sampler:
            yield self.sampler.epoch, cuts


def _with_speeds(cuts: CutSet, factors: tuple[float, ...]) -> CutSet:
    copies = [cuts.perturb_speed(factor) for factor in factors if factor != 1.0]
    for copy_of_cuts in copies:
        cuts = cuts + copy_of_cuts
    return cuts


def _buckets(config: DataConfig, cuts: int) -> int:
    """No more buckets than there are cuts to tell them apart."""
    return max(1, min(config.num_buckets, cuts // 2))
