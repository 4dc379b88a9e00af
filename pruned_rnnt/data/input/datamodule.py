"""Makes batches from a prepared folder: sampling by duration, augmentation, worker processes.

The sampler runs in the training process and sends cuts and the epoch number to the workers.
Batches therefore depend on (seed, epoch, world size), but not on the number of workers.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from lhotse import CutSet
from lhotse.dataset import DynamicCutSampler
from lhotse.utils import fastcopy

from pruned_rnnt.data.audio.features import FBANK, SAMPLING_RATE, FeatureKind
from pruned_rnnt.data.input.augmentation import FeatureAugmenter, derived_seed
from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.data.input.filters import CutFilter, cut_symbols, filter_cuts
from pruned_rnnt.data.input.loader import BatchLoader, true_on_all_ranks
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.data.input.sampler import (
    BatchSampler,
    LatticeBound,
    LatticeSize,
    ManifestShards,
    at_speed,
    duration_bins,
    speed_phases,
)
from pruned_rnnt.data.input.speech_dataset import SpeechDataset
from pruned_rnnt.data.tokens.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Number of streamed cuts of which the durations are measured, from half to twice as many.
_MEASURED_CUTS = 10_000
# Number of these that may replace a batch in which no utterance can be read.
_MAX_SUBSTITUTES = 8
_PERCENTILE = 0.99
# With 1000, as speeds of three decimals have at most, an utterance takes some milliseconds.
_SLOW_PHASES = 1000


class DataModule:
    """Tokenizer and batch loaders of one prepared folder, for one rank of `world_size`.

    tokenizer: that of the folder, if None is given.
    kind: the features of the model, which data.features=waveform computes.
    view_mask_factor: training batches have two views of each utterance, as
        `FeatureAugmenter.two_views` makes them; bounds on the size of a batch count both. None: one
        view.
    ctc: as in `CutFilter`.
    p99_duration: 99th percentile of the training utterances' durations in seconds; set by
        `train_loader`.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
        tokenizer: Tokenizer | None = None,
        view_mask_factor: float | None = None,
        kind: FeatureKind = FBANK,
        ctc: bool = False,
    ) -> None:
        self.config = config
        self.ctc = ctc
        self.kind = kind
        self.view_mask_factor = view_mask_factor
        self.rank = rank
        self.world_size = world_size
        self.folder = PreparedFolder(Path(config.path), config.allow_commands)
        if tokenizer is None and not self.folder.path.is_dir():
            where = "" if self.folder.path.is_absolute() else f" in {Path.cwd()}"
            raise FileNotFoundError(
                f"data.path is {config.path}, and there is no such folder{where}: run "
                "`pruned-rnnt prepare` first, or name the folder that it wrote"
            )
        self.tokenizer = tokenizer or self.folder.tokenizer()
        self.p99_duration = 0.0

    def train_loader(self) -> BatchLoader:
        """Shuffled, bucketed, filtered and augmented batches of the training split.

        An epoch has the same number of batches on every rank.
        """
        config = self.config
        if config.max_duration == math.inf and not (config.max_cuts or config.max_lattice):
            raise ValueError(
                "data.max_duration is inf, so that nothing bounds the batches: needs a finite "
                "number of seconds, or data.max_cuts or data.max_lattice above 0"
            )
        views = 1 if self.view_mask_factor is None else 2
        size = lattice_size(config, self.tokenizer)
        most = max(1, config.max_lattice // views)
        bound = LatticeBound(size, most) if config.max_lattice else None
        too_large = None if bound is None else bound.is_exceeded_by
        folders = [self.folder]
        if config.old_path and config.old_share > 0:
            folders.append(PreparedFolder(Path(config.old_path), config.allow_commands))
        streamed = config.lazy or any(len(f.manifests(config.train)) > 1 for f in folders)
        options = (config.filters, self.tokenizer, too_large, config.augmentation.tempo, self.ctc)
        if self.rank == 0:
            _warn_of_slow_speeds(tuple(config.speed_factors))
        sources = [self._training_cuts(folder, CutFilter(*options), streamed) for folder in folders]
        cuts = sources[0]
        if len(sources) > 1:
            cuts = _MixedCuts(cuts, sources[1], share=config.old_share, seed=config.seed)
        measured = [cut for source in sources for cut in _measured_cuts(source)]
        self.p99_duration = p99_duration([cut.duration for cut in measured])
        if config.joining.probability > 0:
            # Known lengths of audio: transcription does not cut what is shorter.
            self.p99_duration = max(self.p99_duration, config.joining.longest_seconds)
        with warnings.catch_warnings():
            # A small corpus is held in memory on purpose; the sampler warns about it.
            warnings.filterwarnings("ignore", message=".*eagerly read CutSet.*")
            sampler = BatchSampler(
                cuts,
                lattice_bound=bound,
                max_duration=config.max_duration / views,
                max_cuts=max(1, config.max_cuts // views) if config.max_cuts else None,
                duration_bins=duration_bins(measured, config.num_buckets),
                first_bins=lambda: duration_bins(
                    [cut for source in sources for cut in _first_cuts(source, _MEASURED_CUTS)],
                    config.num_buckets,
                ),
                buffer_size=config.buffer_size,
                shuffle=True,
                drop_last=False,
                seed=config.seed,
                # ManifestShards already divides the cuts among the ranks.
                rank=0 if streamed else self.rank,
                world_size=1 if streamed else self.world_size,
            )
        augmenter = FeatureAugmenter(
            config.augmentation, seed=config.seed, view_mask_factor=self.view_mask_factor or 1.0
        )
        all_true = true_on_all_ranks if streamed and self.world_size > 1 else None
        return self._loader(
            sampler, augmenter, measured[:_MAX_SUBSTITUTES], all_true, lattice_bound=bound
        )

    def _training_cuts(self, folder: PreparedFolder, cut_filter: CutFilter, streamed: bool) -> Any:
        """The filtered training cuts of a folder; streamed ones are those of this rank."""
        config = self.config
        manifests = folder.manifests(config.train)
        first = next(iter(folder.cuts(config.train, lazy=True)), None)
        if first is None:
            raise _no_utterances(folder, "data.train", config.train)
        self._check_kind(first, folder)
        if config.speed_factors and self.rank == 0 and first.has_features:
            logger.warning(
                "%s has stored features, which are not used, because data.speed_factors needs "
                "features computed from the recordings",
                folder.path,
            )
        cuts: Any
        if streamed:
            cuts = ManifestShards(
                manifests,
                transform=folder.make_absolute(),
                cut_filter=cut_filter,
                speeds=config.speed_factors,
                seed=config.seed,
                rank=self.rank,
                world_size=self.world_size,
                allow_commands=config.allow_commands,
            )
        else:
            cuts = _with_speeds(folder.cuts(config.train), config.speed_factors)
            cuts = filter_cuts(cuts, cut_filter, config.train)
        if not _first_cuts(cuts, 1):
            raise ValueError(
                f"the filters leave no training utterances of {manifests[0]}: "
                f"{cut_filter.describe()}"
            )
        return cuts

    def valid_loader(self) -> BatchLoader:
        """Batches of the validation split; see `test_loader`.

        Raises ValueError if it has no utterance: there would be no error rate.
        """
        loader = self.test_loader(self.config.valid)
        if not loader.utterances:
            raise _no_utterances(self.folder, "data.valid", self.config.valid)
        return loader

    def test_loader(self, split: str = "test", *, sample: int | None = None) -> BatchLoader:
        """Batches of any split: every utterance, longest first, neither filtered nor augmented.

        With several ranks the last batch may repeat utterances, so that all ranks have the same
        number of batches; `Batch.repeats` has them. Utterances that cannot be read are left out as
        in training.

        Args:
            sample: only so many utterances, spread over the first 10,000.
        """
        cuts = self.folder.cuts(split) if sample is None else self._sample(split, sample)
        cuts = cuts.sort_by_duration()
        for cut in islice(cuts, 1):
            self._check_kind(cut, self.folder)
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
        # Several ranks need the same number of batches. A single rank does not, so it drops a batch
        # that cannot be read.
        substitutes = list(islice(cuts, _MAX_SUBSTITUTES)) if self.world_size > 1 else []
        own_ids = frozenset(cut.id for cut in cuts) if self.world_size > 1 else None
        return self._loader(sampler, None, substitutes, utterances=len(cuts), own_ids=own_ids)

    def _sample(self, split: str, count: int) -> CutSet:
        first = list(islice(self.folder.cuts(split, lazy=True), _MEASURED_CUTS))
        return CutSet.from_cuts(first[:: max(1, len(first) // max(1, count))][:count])

    def _check_kind(self, cut: Any, folder: PreparedFolder) -> None:
        """Raises ValueError if a cut of the data lacks what `features` needs."""
        wanted = self.config.features
        other = "waveform" if wanted == "stored" else "stored"
        if not (cut.has_features if wanted == "stored" else cut.has_recording):
            raise ValueError(
                f"{folder.path} was not prepared for data.features={wanted}; set "
                f"data.features={other}, or prepare it again with --features {wanted}"
            )

    def _loader(
        self,
        sampler: Any,
        augmenter: FeatureAugmenter | None,
        substitutes: Sequence[Any],
        all_true: Callable[[bool], bool] | None = None,
        utterances: int | None = None,
        own_ids: frozenset[str] | None = None,
        lattice_bound: LatticeBound | None = None,
    ) -> BatchLoader:
        config = self.config
        dataset = SpeechDataset(
            self.tokenizer,
            stored=config.features == "stored",
            kind=self.kind,
            augmenter=augmenter,
            bad_audio=config.bad_audio,
            substitutes=substitutes,
            allow_commands=config.allow_commands,
            two_views=augmenter is not None and self.view_mask_factor is not None,
            joining=config.joining,
            lattice_bound=lattice_bound,
        )
        return BatchLoader(
            sampler,
            dataset,
            num_workers=config.num_workers,
            prefetch_factor=config.prefetch_factor,
            world_size=self.world_size,
            all_true=all_true,
            utterances=utterances,
            own_ids=own_ids,
        )


def _no_utterances(folder: PreparedFolder, key: str, split: str) -> ValueError:
    return ValueError(
        f"the split {split!r} of {folder.path} has no utterances: prepare the folder again, or set "
        f"{key} to another split"
    )


def lattice_size(config: DataConfig, tokenizer: Tokenizer) -> LatticeSize:
    """Measures the lattices of training utterances."""
    return LatticeSize(
        lambda cut: len(cut_symbols(cut, tokenizer)),
        config.filters.frame_step,
        stretch=1 / (1 - config.augmentation.tempo),
    )


def _measured_cuts(cuts: Any) -> list[Any]:
    """The training cuts of which durations are measured: all, or a sample of streamed ones."""
    if not isinstance(cuts, ManifestShards):
        return list(cuts)
    # The filters may leave out every cut of the sample.
    return list(cuts.spread(_MEASURED_CUTS)) or _first_cuts(cuts, 1)


def _first_cuts(cuts: Any, count: int) -> list[Any]:
    first = cuts.from_first_shard() if isinstance(cuts, ManifestShards) else cuts
    return list(islice(first, count))


def _with_speeds(cuts: CutSet, factors: tuple[float, ...]) -> CutSet:
    factors = tuple(factor for factor in factors if factor != 1.0)
    if factors:
        original = cuts
        for factor in factors:
            cuts = cuts + original.map(partial(at_speed, speed=factor))
    return cuts


@cache  # a search for the largest batches makes a loader for each probe
def _warn_of_slow_speeds(factors: tuple[float, ...]) -> None:
    slow = [each for each in factors if speed_phases(SAMPLING_RATE, each) > _SLOW_PHASES]
    if slow:
        logger.warning(
            "data.speed_factors has %s, which may take half a second per utterance; speeds of at "
            "most three decimals take some milliseconds",
            slow,
        )


class _MixedCuts:
    """All cuts of one source in an epoch, and among them cuts of another one by a share.

    So a model that is fine-tuned does not forget the other corpus.

    Each epoch has its own choice of the other cuts, which depends on the seed and the epoch alone,
    so training resumes exactly. If they do not suffice, they are used again.

    cuts, others: sources of cuts; `set_epoch` of the first and `set_pass` of the second are called
        if they have them. `others` is never empty, but one process may get none of it in some
        passes.
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
            for cut in self._pass(passes):
                yield fastcopy(cut, id=f"{cut.id}{name}") if name else cut
            passes += 1

    def _pass(self, number: int) -> Iterable[Any]:
        if hasattr(self.others, "set_pass"):  # streamed; the order of the shards is random
            self.others.set_pass(self.epoch, number)
            return self.others
        cuts = list(self.others)
        Random(derived_seed("old data", self.seed, self.epoch, number)).shuffle(cuts)
        return cuts


def p99_duration(durations: Sequence[float]) -> float:
    """99th percentile of the durations, so that a few very long utterances are ignored."""
    return float(sorted(durations)[int(_PERCENTILE * (len(durations) - 1))])
