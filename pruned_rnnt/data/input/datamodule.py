"""From a prepared folder to batches: sampling by duration, augmentation, worker processes.

The sampler lives in the training process and hands cuts to the workers with the number of the
epoch, so batches depend on (seed, epoch, world size) alone, never on the number of workers.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from lhotse import CutSet
from lhotse.dataset import DynamicCutSampler

from pruned_rnnt.data.input.augmentation import AugmentationConfig, FeatureAugmenter
from pruned_rnnt.data.input.filters import CutFilter, FilterConfig, cut_text, filter_cuts
from pruned_rnnt.data.input.loader import BatchLoader, all_processes
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.data.input.sampler import BatchSampler, LatticeSize, ManifestShards, duration_bins
from pruned_rnnt.data.input.speech_dataset import CutsToBatch
from pruned_rnnt.data.input.training_durations import usual_longest
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.setting_checks import check_at_least

logger = logging.getLogger(__name__)

# Cuts that buckets are made from; and of those, how many may stand in for an unreadable batch.
_CUTS_FOR_BINS = 10_000
_SPARES = 8


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which data, and how it becomes batches.

    path: folder that `pruned-rnnt prepare` made.
    train, valid: names of the splits to train on and to validate with.
    features: "stored" reads what prepare computed; "waveform" computes features from the
        recordings each time, which allows `speed_factors`.
    speed_factors: with "waveform", every training utterance is also used at these speeds.
    max_duration: seconds of speech in a training batch, padding not counted.
    max_cuts: most utterances in a batch; 0 for no bound.
    max_lattice: largest padded lattice of a training batch, utterances x encoder frames x
        (symbols + 1), each that of the largest; 0 for no bound. It is what memory grows with where
        some texts are far longer than others of their duration. An utterance that is larger by
        itself is left out.
    valid_max_duration: seconds of speech in a batch of validation or decoding.
    num_buckets: utterances of similar duration are batched together, in this many groups.
    buffer_size: cuts held for bucketing and shuffling.
    lazy: stream the training manifest instead of holding it in memory. A split that prepare wrote
        in shards is always streamed, each process reading its own shards.
    bad_audio: an utterance that cannot be read (a truncated or missing file, NaN) is left out of
        its batch, logged and counted ("skip"), or training stops ("stop").
    allow_commands: audio may come from shell commands that the manifests name. They run when it is
        read: only for manifests which you trust.
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
    max_lattice: int = 0
    valid_max_duration: float = 120.0
    num_buckets: int = 10
    buffer_size: int = 20000
    lazy: bool = False
    bad_audio: Literal["skip", "stop"] = "skip"
    allow_commands: bool = False
    num_workers: int = 1
    prefetch_factor: int = 4
    seed: int = 42
    filters: FilterConfig = field(default_factory=FilterConfig)
    augmentation: AugmentationConfig = field(default_factory=AugmentationConfig)

    def __post_init__(self) -> None:
        if self.speed_factors and self.features == "stored":
            raise ValueError(
                "data.speed_factors need data.features=waveform: stored features have the speeds "
                f"that prepare gave them; got {list(self.speed_factors)}"
            )
        for name in ("max_duration", "valid_max_duration"):
            if not getattr(self, name) > 0:
                raise ValueError(f"data.{name} is {getattr(self, name)}, needs seconds above 0")
        if not all(factor > 0 for factor in self.speed_factors):
            raise ValueError(
                f"data.speed_factors is {list(self.speed_factors)}, needs factors above 0"
            )
        check_at_least("data", self, max_cuts=0, max_lattice=0, num_buckets=1, buffer_size=1)
        check_at_least("data", self, num_workers=0, prefetch_factor=1)


class DataModule:
    """Tokenizer and batch loaders of one prepared folder, for one rank of `world_size`.

    usual_longest: of the training utterances, in seconds, once `train_loader` was called.
    """

    def __init__(self, config: DataConfig, *, rank: int = 0, world_size: int = 1) -> None:
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.folder = PreparedFolder(Path(config.path), config.allow_commands)
        self.tokenizer = self.folder.tokenizer()
        self.usual_longest = 0.0

    def train_loader(self) -> BatchLoader:
        """Shuffled, bucketed, filtered and augmented batches of the training split.

        An epoch has the same number of batches on every rank.
        """
        config = self.config
        size = lattice_size(config, self.tokenizer)
        too_large = (
            (lambda cut: size.nodes(cut) > config.max_lattice) if config.max_lattice else None
        )
        tempo = config.augmentation.tempo
        cut_filter = CutFilter(config.filters, self.tokenizer, too_large, tempo)
        manifests = self.folder.manifests(config.train)
        streamed = config.lazy or len(manifests) > 1
        for cut in islice(self.folder.cuts(config.train, lazy=True), 1):
            self._check_kind(cut)
        cuts: Any
        if streamed:
            cuts = ManifestShards(
                manifests,
                change=self.folder.make_absolute(),
                keep=cut_filter,
                speeds=config.speed_factors,
                seed=config.seed,
                rank=self.rank,
                world_size=self.world_size,
                allow_commands=config.allow_commands,
            )
            beginning = list(islice(cuts.beginning(), _CUTS_FOR_BINS))
        else:
            cuts = _with_speeds(self.folder.cuts(config.train), config.speed_factors)
            cuts = filter_cuts(cuts, cut_filter, config.train)
            beginning = list(islice(cuts, _CUTS_FOR_BINS))
        if not beginning:
            raise ValueError(
                f"no training cuts are left of {manifests[0]}: {cut_filter.describe()}"
            )
        if config.speed_factors and self.rank == 0 and any(cut.has_features for cut in beginning):
            logger.warning(
                "%s has stored features, which are not used: data.speed_factors need features that "
                "are computed from the recordings",
                self.folder.path,
            )
        self.usual_longest = usual_longest([cut.duration for cut in beginning])
        with warnings.catch_warnings():
            # A small corpus is better held in memory, whatever the sampler says about it.
            warnings.filterwarnings("ignore", message=".*eagerly read CutSet.*")
            sampler = BatchSampler(
                cuts,
                max_lattice=config.max_lattice,
                lattice_size=size,
                max_duration=config.max_duration,
                max_cuts=config.max_cuts or None,
                duration_bins=duration_bins(beginning, config.num_buckets),
                buffer_size=config.buffer_size,
                shuffle=True,
                drop_last=False,
                seed=config.seed,
                # What is streamed is of one rank already.
                rank=0 if streamed else self.rank,
                world_size=1 if streamed else self.world_size,
            )
        augmenter = FeatureAugmenter(config.augmentation, seed=config.seed)
        agree = all_processes if streamed and self.world_size > 1 else None
        return self._loader(sampler, augmenter, beginning[:_SPARES], agree)

    def valid_loader(self) -> BatchLoader:
        """Batches of the validation split: every utterance, in a fixed order, as it is."""
        return self.test_loader(self.config.valid)

    def test_loader(self, split: str = "test") -> BatchLoader:
        """Batches of any split: every utterance, longest first, neither filtered nor augmented.

        With several ranks the last batch may repeat utterances so that each rank has one; their
        ids end in `_dup0`. Utterances that cannot be read are left out as in training.
        """
        cuts = self.folder.cuts(split).sort_by_duration()
        for cut in islice(cuts, 1):
            self._check_kind(cut)
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
        # One process may have fewer batches; several need equally many, and validation drops what
        # is named as repeated.
        spares = list(islice(cuts, _SPARES)) if self.world_size > 1 else []
        return self._loader(sampler, None, spares, utterances=len(cuts))

    def _check_kind(self, cut: Any) -> None:
        """The data have what `features` asks for, as far as one cut can tell."""
        wanted = self.config.features
        other = "waveform" if wanted == "stored" else "stored"
        if not (cut.has_features if wanted == "stored" else cut.has_recording):
            raise ValueError(
                f"{self.folder.path} was prepared without what data.features={wanted} needs: set "
                f"data.features={other}, or prepare it again with --features {wanted}"
            )

    def _loader(
        self,
        sampler: Any,
        augmenter: FeatureAugmenter | None,
        spares: Sequence[Any],
        agree: Callable[[bool], bool] | None = None,
        utterances: int | None = None,
    ) -> BatchLoader:
        config = self.config
        dataset = CutsToBatch(
            self.tokenizer,
            stored=config.features == "stored",
            augmenter=augmenter,
            bad_audio=config.bad_audio,
            spares=spares,
            allow_commands=config.allow_commands,
        )
        return BatchLoader(
            sampler,
            dataset,
            num_workers=config.num_workers,
            prefetch_factor=config.prefetch_factor,
            world_size=self.world_size,
            agree=agree,
            utterances=utterances,
        )


def lattice_size(config: DataConfig, tokenizer: Tokenizer) -> LatticeSize:
    """Measures the lattices of training utterances."""
    return LatticeSize(
        lambda cut: len(tokenizer.encode(cut_text(cut))),
        config.filters.subsampling_factor,
        stretch=1 / (1 - config.augmentation.tempo),
    )


def _with_speeds(cuts: CutSet, factors: tuple[float, ...]) -> CutSet:
    factors = tuple(factor for factor in factors if factor != 1.0)
    if factors:
        # lhotse would warn of every cut that it takes the features from.
        plain = cuts.drop_features()
        for factor in factors:
            cuts = cuts + plain.perturb_speed(factor)
    return cuts
