"""Random changes of log-mel features, one utterance at a time.

Features are natural logarithms of mel energies. Adding a constant is a gain, and mixing two sounds
adds their energies: log(exp(a) + exp(b)).

The random draws for an utterance depend on (seed, epoch, cut id) only. The augmented utterance is
therefore the same for any number of workers and ranks and after resuming, and no random state has
to be saved.

Axes: T feature frames, F mel bins.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from lhotse.dataset import SpecAugment
from lhotse.dataset.signal_transforms import time_warp
from torch import Tensor

from pruned_rnnt.data.audio.features import HIGHEST_HERTZ, LOWEST_HERTZ, kaldi_mels
from pruned_rnnt.data.input.data_config import AugmentationConfig, SpecAugmentConfig

# A decibel of energy in natural-log units.
LOG_ENERGY_PER_DB = math.log(10.0) / 10.0
# How much a band limit weakens what it removes.
_STOP_BAND_DB = 80.0
# Range of the log-mel energy that the quantisation of samples to 16 bits leaves; features have a
# floor of about -16.
_SAMPLE_NOISE = (-16.5, -14.5)
# Whether a `preserve_global_rngs` block keeps the states of the generators.
_kept = False


def _spec_augment(
    spec: SpecAugmentConfig, *, time_warp: int = 0, mask_factor: float = 1.0
) -> SpecAugment | None:
    """lhotse's transform, with more time masks by a factor; None if there is nothing to apply."""
    if not spec.enabled:
        return None
    masks = round(spec.frame_masks * mask_factor)
    if 0 in (spec.frame_mask_size, spec.max_masked_fraction):
        masks = 0
    return SpecAugment(
        time_warp_factor=time_warp,
        num_feature_masks=spec.feature_masks if spec.feature_mask_size > 0 else 0,
        features_mask_size=max(1, spec.feature_mask_size),
        # lhotse divides by the number of masks, so no masks are one mask of width 0.
        num_frame_masks=max(1, masks),
        frames_mask_size=spec.frame_mask_size if masks > 0 else 1,
        max_frames_mask_fraction=(
            min(1.0, spec.max_masked_fraction * mask_factor) if masks > 0 else 1.0
        ),
        p=spec.probability,
    )


def _applied(transform: SpecAugment | None, features_TF: Tensor, seed: int) -> Tensor:
    # lhotse fails on utterances that are too short for a time mask of one frame.
    if transform is None or features_TF.shape[0] * transform.max_frames_mask_fraction < 1:
        return features_TF
    with preserve_global_rngs():
        _seed_global_rngs(seed)
        augmented_TF: Tensor = transform(features_TF[None])[0]
    return augmented_TF


def derived_seed(*parts: object) -> int:
    """A 32-bit seed computed from printable values, the same in every process and run."""
    text = "\x00".join(str(part) for part in parts)
    # An id may come from a file name that is not UTF-8.
    encoded = text.encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=4).digest(), "little")


class FeatureAugmenter:
    """Applies an AugmentationConfig to one utterance's features.

    Args:
        view_mask_factor: of `two_views`: factor of the number of time masks and of the largest
            fraction of masked frames, as CR-CTC (arXiv 2410.05101) has it.
    """

    def __init__(
        self, config: AugmentationConfig, *, seed: int, view_mask_factor: float = 1.0
    ) -> None:
        self.config = config
        self.seed = seed
        spec = config.spec_augment
        self._spec_augment = _spec_augment(spec, time_warp=spec.time_warp)
        self._masks = _spec_augment(spec, mask_factor=view_mask_factor)

    def __call__(self, features_TF: Tensor, *, epoch: int, cut_id: str) -> Tensor:
        """float32 (T, F) -> float32 (T', F); T' differs from T only if `tempo` is set.

        Several calls are faster inside one `preserve_global_rngs` block.
        """
        seed = derived_seed(self.seed, epoch, cut_id)
        if self._changes_sound:
            features_TF = self._change_sound(features_TF, np.random.default_rng(seed))
        return _applied(self._spec_augment, features_TF, seed)

    def two_views(self, features_TF: Tensor, *, epoch: int, cut_id: str) -> tuple[Tensor, Tensor]:
        """Two views that differ in their masks alone; sound and time are changed for both at once.

        A time warp of each view by itself would shift their frames against each other. Shapes as
        for a call.
        """
        seed = derived_seed(self.seed, epoch, cut_id)
        if self._changes_sound:
            features_TF = self._change_sound(features_TF, np.random.default_rng(seed))
        spec = self.config.spec_augment
        with preserve_global_rngs():
            _seed_global_rngs(seed)
            if spec.enabled and spec.time_warp > 0 and random.random() <= spec.probability:
                features_TF = time_warp(features_TF, factor=spec.time_warp)
            first_TF, second_TF = (
                _applied(self._masks, features_TF, derived_seed(self.seed, epoch, cut_id, view))
                for view in ("first view", "second view")
            )
        return first_TF, second_TF

    @property
    def _changes_sound(self) -> bool:
        c = self.config
        amounts = (c.tempo, c.frequency_warp, c.noise_probability, c.volume_db, c.tilt_db)
        return any(amount > 0 for amount in (*amounts, c.band_limit_probability))

    def _change_sound(self, features_TF: Tensor, rng: np.random.Generator) -> Tensor:
        config = self.config
        if config.tempo > 0:
            features_TF = stretch_time(features_TF, 1 + rng.uniform(-config.tempo, config.tempo))
        if config.frequency_warp > 0:
            factor = 1 + rng.uniform(-config.frequency_warp, config.frequency_warp)
            features_TF = warp_frequency(features_TF, factor)
        if rng.uniform() < config.noise_probability:
            features_TF = add_noise(features_TF, rng.uniform(*config.noise_snr_db), rng)
        gain_db = rng.uniform(-config.volume_db, config.volume_db)
        tilt_db = rng.uniform(-config.tilt_db, config.tilt_db)
        if gain_db != 0 or tilt_db != 0:
            gain_F = gain_db + tilt_db * torch.linspace(-0.5, 0.5, features_TF.shape[1])
            features_TF = features_TF + gain_F * LOG_ENERGY_PER_DB
        # Drawn only if set, so that the other draws of earlier configurations stay the same.
        if config.band_limit_probability > 0 and rng.uniform() < config.band_limit_probability:
            features_TF = limit_band(features_TF, rng.uniform(*config.band_limit_hz), rng)
        return features_TF


def _seed_global_rngs(seed: int) -> None:
    """Seeds the global generators of Python, numpy and torch (CPU); SpecAugment uses all three."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - lhotse draws from the global generator
    torch.default_generator.manual_seed(seed)


@contextmanager
def preserve_global_rngs() -> Iterator[None]:
    """Restores the state of the global generators of Python, numpy and torch (CPU) at the end.

    Inside another such block it does nothing, because saving and restoring take 0.1 ms.
    """
    global _kept
    if _kept:
        yield
        return
    _kept = True
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002
    torch_state = torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        torch.set_rng_state(torch_state)
        _kept = False


def stretch_time(features_TF: Tensor, tempo: float) -> Tensor:
    """Resamples (T, F) linearly to round(T / tempo) frames; `tempo` > 1 makes speech faster."""
    frames = max(1, round(features_TF.shape[0] / tempo))
    stretched_1FT = torch.nn.functional.interpolate(
        features_TF.T[None], size=frames, mode="linear", align_corners=False
    )
    return stretched_1FT[0].T.contiguous()


def warp_frequency(features_TF: Tensor, factor: float) -> Tensor:
    """Moves energy at frequency f to about f * factor, on the mel axis of (T, F) features.

    The map is linear up to a knee, and bends there so that the highest bin does not move
    (piecewise-linear warp of Lee and Rose 1996, as in vocal tract length perturbation).
    """
    bins = features_TF.shape[1]
    mel_F, hz_F = _bin_centres(bins)
    top_hz = hz_F[-1]
    knee_hz = 0.8 * top_hz * min(1.0, factor)
    # The source frequency of each target bin.
    source_hz_F = np.interp(hz_F, [0.0, knee_hz, top_hz], [0.0, knee_hz / factor, top_hz])
    position_F = np.clip(np.interp(kaldi_mels(source_hz_F), mel_F, np.arange(bins)), 0, bins - 1)
    left_F = torch.from_numpy(np.minimum(position_F.astype(np.int64), bins - 2))
    weight_F = torch.from_numpy((position_F - left_F.numpy()).astype(np.float32))
    return features_TF[:, left_F] * (1 - weight_F) + features_TF[:, left_F + 1] * weight_F


def limit_band(features_TF: Tensor, cutoff_hz: float, rng: np.random.Generator) -> Tensor:
    """Removes what is above `cutoff_hz` from (T, F); the noise of 16-bit samples is left there."""
    frames, bins = features_TF.shape
    _, hz_F = _bin_centres(bins)
    gain_F = torch.from_numpy(-_STOP_BAND_DB * LOG_ENERGY_PER_DB * (hz_F > cutoff_hz))
    level = rng.uniform(*_SAMPLE_NOISE)
    noise_TF = torch.from_numpy(level + np.log(rng.gamma(4.0, 0.25, size=(frames, bins))))
    return torch.logaddexp(features_TF + gain_F.float(), noise_TF.float())


def _bin_centres(bins: int) -> tuple[np.ndarray, np.ndarray]:
    """The centres of the mel bins, in mel and in Hz."""
    mel_F = np.linspace(kaldi_mels(LOWEST_HERTZ), kaldi_mels(HIGHEST_HERTZ), bins + 2)[1:-1]
    return mel_F, 700.0 * (np.exp(mel_F / 1127.0) - 1.0)


def add_noise(features_TF: Tensor, snr_db: float, rng: np.random.Generator) -> Tensor:
    """Adds stationary noise with a random smooth spectrum to (T, F), `snr_db` below the speech."""
    frames, bins = features_TF.shape
    colour_db_F = np.interp(np.linspace(0, 4, bins), np.arange(5), rng.uniform(-10.0, 10.0, size=5))
    # The energy of noise fluctuates from frame to frame; a mel bin averages several of them.
    fluctuation_TF = rng.gamma(4.0, 0.25, size=(frames, bins))
    noise_TF = torch.from_numpy(
        (colour_db_F * LOG_ENERGY_PER_DB + np.log(fluctuation_TF)).astype(np.float32)
    )
    speech_level = torch.logsumexp(features_TF.flatten(), 0)
    noise_level = torch.logsumexp(noise_TF.flatten(), 0)
    noise_TF += speech_level - noise_level - snr_db * LOG_ENERGY_PER_DB
    return torch.logaddexp(features_TF, noise_TF)
