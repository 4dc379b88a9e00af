"""Settings of augmentation, apart from it: every command reads them, few need lhotse's modules."""

from __future__ import annotations

from dataclasses import dataclass, field

from pruned_rnnt.config.checks import check_at_least, check_fractions


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
