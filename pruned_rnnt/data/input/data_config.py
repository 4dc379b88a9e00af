"""The settings of the section `data`: which utterances, and how batches are made of them.

Apart from the code that uses them: every command reads them, few need lhotse's modules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from pruned_rnnt.config.checks import check_at_least, check_fractions, joined_names
from pruned_rnnt.data.input.filters import FilterConfig


@dataclass(frozen=True, kw_only=True)
class SpecAugmentConfig:
    """SpecAugment (Park et al. 2019, arXiv 1904.08779), as implemented in lhotse.

    enabled: apply SpecAugment.
    probability: probability that an utterance is masked (and warped).
    time_warp: largest warp in frames of 10 ms; utterances of less than twice this length are not
        warped.
    feature_masks: number of masks over mel bins.
    feature_mask_size: size of the largest mask over mel bins.
    frame_masks: number of masks over time.
    frame_mask_size: size of the largest mask over time, in frames of 10 ms.
    max_masked_fraction: largest fraction of an utterance's frames that is masked.
    """

    enabled: bool = True
    probability: float = 0.9
    time_warp: int = 80
    feature_masks: int = 2
    feature_mask_size: int = 27
    frame_masks: int = 10
    frame_mask_size: int = 100
    max_masked_fraction: float = 0.15

    def __post_init__(self) -> None:
        section = "data.augmentation.spec_augment"
        check_at_least(section, self, time_warp=0, feature_masks=0, feature_mask_size=0)
        check_at_least(section, self, frame_masks=0, frame_mask_size=0)
        check_fractions(section, self, "probability", "max_masked_fraction")


@dataclass(frozen=True, kw_only=True)
class AugmentationConfig:
    """Augmentation of the training features; zero disables a change.

    tempo: 0.1 stretches time by a factor between 0.9 and 1.1 without changing the spectrum.
    frequency_warp: 0.1 stretches the frequency axis by a factor between 0.9 and 1.1, which
        imitates vocal tracts of other lengths.
    tilt_db: largest rise or fall in dB from the lowest to the highest mel bin, which imitates
        other microphones.
    volume_db: largest gain or loss in dB.
    band_limit_probability, band_limit_hz: probability that the frequencies above a cutoff are lost,
        as in telephone speech and recordings at 8 kHz, and range of the cutoff in Hz.
    noise_probability, noise_snr_db: probability that stationary coloured noise is added, and range
        of its signal-to-noise ratio in dB.
    noise_cuts: path of a lhotse CutSet (`*.jsonl.gz`) of recorded noises to mix in. They need
        stored features if the speech has stored features.
    noise_cuts_probability, noise_cuts_snr_db: probability that a recorded noise is mixed in, and
        range of its signal-to-noise ratio in dB.
    """

    spec_augment: SpecAugmentConfig = field(default_factory=SpecAugmentConfig)
    tempo: float = 0.0
    frequency_warp: float = 0.0
    tilt_db: float = 0.0
    volume_db: float = 0.0
    band_limit_probability: float = 0.0
    band_limit_hz: tuple[float, float] = (3400.0, 4500.0)
    noise_probability: float = 0.0
    noise_snr_db: tuple[float, float] = (10.0, 30.0)
    noise_cuts: str = ""
    noise_cuts_probability: float = 0.5
    noise_cuts_snr_db: tuple[float, float] = (10.0, 20.0)

    def __post_init__(self) -> None:
        section = "data.augmentation"
        check_fractions(section, self, "tempo", "frequency_warp", below_one=True)
        check_fractions(section, self, "noise_probability", "noise_cuts_probability")
        check_fractions(section, self, "band_limit_probability")
        check_at_least(section, self, tilt_db=0, volume_db=0)
        # Only what fails in training: runs that never used their ranges must stay readable.
        ranges = {
            "band_limit_hz": self.band_limit_probability,
            "noise_snr_db": self.noise_probability,
        }
        for name, probability in ranges.items():
            low, high = getattr(self, name)
            if probability > 0 and not -math.inf < low <= high < math.inf:
                raise ValueError(
                    f"{section}.{name} is [{low}, {high}], needs two finite numbers, the lower "
                    "one first"
                )


@dataclass(frozen=True, kw_only=True)
class JoiningConfig:
    """Silence around training utterances, and utterances joined into longer ones.

    silence_probability: probability that the utterances of a batch get silence before or after
        them, or both, which fills the batch to one length. It is digital silence, noise of any
        level and colour, or noise like the utterance's own background.
    silence_seconds: longest silence before or after an utterance; also the most by which the
        length of a batch grows, on top of data.max_duration and, unless its utterances are joined,
        of data.max_lattice.
    probability: probability that the utterances of a batch are joined, in groups of equal size, as
        far as data.max_lattice allows.
    longest_seconds: longest joined utterance.
    pause_probability: probability of a pause between two joined utterances.
    pause_seconds: longest pause.
    gain_db: largest gain or loss in dB of each joined utterance, as if several people spoke.
    """

    silence_probability: float = 0.0
    silence_seconds: float = 2.0
    probability: float = 0.0
    longest_seconds: float = 20.0
    pause_probability: float = 0.5
    pause_seconds: float = 1.0
    gain_db: float = 0.0

    def __post_init__(self) -> None:
        section = "data.joining"
        check_fractions(section, self, "silence_probability", "probability", "pause_probability")
        check_at_least(section, self, silence_seconds=0, longest_seconds=0)
        check_at_least(section, self, pause_seconds=0, gain_db=0)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data and how to make batches of it.

    path: folder that `pruned-rnnt prepare` wrote.
    train: name of the split to train on.
    valid: split to validate on, or several as one: `dev,test` or `[dev, test]`.
    old_path: folder that `pruned-rnnt prepare` wrote; utterances of its split `train` are mixed in,
        so that fine-tuning does not forget them. Empty for none.
    old_share: share of these among the training utterances. An epoch has all utterances of `path`.
    features: "stored" reads the features that prepare computed; "waveform" computes features from
        the recordings each time, which allows `speed_factors`, and which models with features of
        their own need (`model.encoder.features`).
    speed_factors: with "waveform", use every training utterance at these speeds too. Speeds such
        as 0.9 are computed fast, those of four decimals may take half a second per utterance.
    max_duration: seconds of speech in a training batch, without padding.
    max_cuts: largest number of utterances in a batch; 0 for no bound.
    max_lattice: largest padded lattice of a training batch: utterances x most encoder frames x
        (most symbols + 1); 0 for no bound. Memory grows with this size if some texts are far longer
        than others of the same duration. An utterance that exceeds it alone is left out.
    valid_max_duration: seconds of speech in a batch of validation or decoding.
    num_buckets: number of groups of similar duration; a batch comes from one group.
    buffer_size: number of cuts held for bucketing and shuffling.
    lazy: stream the training manifest instead of holding it in memory. A split that prepare wrote
        in shards is always streamed, and each process parses its own lines of every shard.
    bad_audio: "skip" leaves an utterance that cannot be read (truncated or missing file, NaN) out
        of its batch, with a log message and a count; "stop" ends the training.
    allow_commands: run the shell commands that manifests contain instead of audio files; use it
        only if you trust the manifests.
    num_workers, prefetch_factor: number of worker processes, and of batches that each prepares in
        advance. With 0 workers the training process loads the data itself.
    seed: seed of the order of batches and of all augmentation.
    """

    path: str = "data/synthetic"
    train: str = "train"
    # A text or a list, which `__post_init__` joins.
    valid: Any = "dev"
    old_path: str = ""
    old_share: float = 0.25
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
    joining: JoiningConfig = field(default_factory=JoiningConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "valid", joined_names("data.valid", self.valid))
        if "," in self.train:
            raise ValueError(
                f"data.train is {self.train!r}, needs the name of one split: prepare the "
                "utterances of all of them together"
            )
        if self.speed_factors and self.features == "stored":
            raise ValueError(
                "data.speed_factors needs data.features=waveform, because the speeds of stored "
                f"features are fixed by prepare; got {list(self.speed_factors)}"
            )
        for name in ("max_duration", "valid_max_duration"):
            if not getattr(self, name) > 0:
                raise ValueError(f"data.{name} must be above 0 seconds, got {getattr(self, name)}")
        if not all(0 < factor < math.inf for factor in self.speed_factors):
            raise ValueError(
                f"data.speed_factors is {list(self.speed_factors)}, needs finite speeds above 0, "
                "such as [0.9, 1.1]"
            )
        check_fractions("data", self, "old_share", below_one=True)
        check_at_least("data", self, max_cuts=0, max_lattice=0, num_buckets=1, buffer_size=1)
        check_at_least("data", self, num_workers=0, prefetch_factor=1)

    def check_unchanged_samples(self) -> None:
        """Raise ValueError for settings that change log-mel energies, which samples are not."""
        augmentation, joining = self.augmentation, self.joining
        off = {
            "augmentation.spec_augment.enabled": augmentation.spec_augment.enabled,
            **{
                f"augmentation.{name}": getattr(augmentation, name)
                for name in (
                    "tempo",
                    "frequency_warp",
                    "tilt_db",
                    "volume_db",
                    "band_limit_probability",
                    "noise_probability",
                )
            },
            "joining.silence_probability": joining.silence_probability,
            "joining.probability": joining.probability,
        }
        for name, value in off.items():
            if value:
                wanted = "false" if value is True else "0"
                raise ValueError(
                    f"data.{name} is {str(value).lower()}, which changes log-mel energies, but "
                    f"model.encoder.features is samples: set data.{name}={wanted}; the model masks "
                    "spans of its own frames, and data.speed_factors and noise_cuts work on samples"
                )
