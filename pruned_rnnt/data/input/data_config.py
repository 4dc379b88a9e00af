"""The settings of the section `data`: which utterances, and how batches are made of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pruned_rnnt.config.checks import check_at_least, check_fractions, joined_names
from pruned_rnnt.data.input.augmentation_config import AugmentationConfig
from pruned_rnnt.data.input.filters import FilterConfig
from pruned_rnnt.data.input.joining import JoiningConfig


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
    speed_factors: with "waveform", use every training utterance at these speeds too.
    max_duration: seconds of speech in a training batch, without padding.
    max_cuts: largest number of utterances in a batch; 0 for no bound.
    max_lattice: largest padded lattice of a training batch: utterances x most encoder frames x
        (most symbols + 1); 0 for no bound. Memory grows with this size if some texts are far longer
        than others of the same duration. An utterance that exceeds it alone is left out.
    valid_max_duration: seconds of speech in a batch of validation or decoding.
    num_buckets: number of groups of similar duration; a batch comes from one group.
    buffer_size: number of cuts held for bucketing and shuffling.
    lazy: stream the training manifest instead of holding it in memory. A split that prepare wrote
        in shards is always streamed, and each process reads its own shards.
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
        if not all(factor > 0 for factor in self.speed_factors):
            raise ValueError(f"data.speed_factors must be above 0, got {list(self.speed_factors)}")
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
