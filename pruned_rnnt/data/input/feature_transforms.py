"""Changes of log-mel features that sound like other tempi, speakers, bands and noise.

Axes: T feature frames, F mel bins. Features are natural logarithms of mel energies. Adding a
constant is a gain, and mixing two sounds adds their energies: log(exp(a) + exp(b)).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

# A decibel of energy in natural-log units.
LOG_ENERGY_PER_DB = math.log(10.0) / 10.0
# How much a band limit weakens what it removes.
_STOP_BAND_DB = 80.0
# Range of the log-mel energy that the quantisation of samples to 16 bits leaves; features have a
# floor of about -16.
_SAMPLE_NOISE = (-16.5, -14.5)


def stretch_time(features_TF: Tensor, tempo: float) -> Tensor:
    """Resamples (T, F) linearly to round(T / tempo) frames; `tempo` > 1 makes speech faster."""
    frames = max(1, round(features_TF.shape[0] / tempo))
    stretched_1FT = torch.nn.functional.interpolate(
        features_TF.T[None], size=frames, mode="linear", align_corners=False
    )
    return stretched_1FT[0].T.contiguous()


def warp_frequency(
    features_TF: Tensor, factor: float, *, sampling_rate: int = 16000, low_hz: float = 20.0
) -> Tensor:
    """Moves energy at frequency f to about f * factor, on the mel axis of (T, F) features.

    The map is linear up to a knee, and bends there so that the highest bin does not move
    (piecewise-linear warp of Lee and Rose 1996, as in vocal tract length perturbation).
    """
    bins = features_TF.shape[1]
    mel_F, hz_F = _bin_centres(bins, sampling_rate, low_hz)
    top_hz = hz_F[-1]
    knee_hz = 0.8 * top_hz * min(1.0, factor)
    # The source frequency of each target bin.
    source_hz_F = np.interp(hz_F, [0.0, knee_hz, top_hz], [0.0, knee_hz / factor, top_hz])
    position_F = np.clip(np.interp(_mel(source_hz_F), mel_F, np.arange(bins)), 0, bins - 1)
    left_F = torch.from_numpy(np.minimum(position_F.astype(np.int64), bins - 2))
    weight_F = torch.from_numpy((position_F - left_F.numpy()).astype(np.float32))
    return features_TF[:, left_F] * (1 - weight_F) + features_TF[:, left_F + 1] * weight_F


def limit_band(
    features_TF: Tensor,
    cutoff_hz: float,
    rng: np.random.Generator,
    *,
    sampling_rate: int = 16000,
    low_hz: float = 20.0,
) -> Tensor:
    """Removes what is above `cutoff_hz` from (T, F); the noise of 16-bit samples is left there."""
    frames, bins = features_TF.shape
    _, hz_F = _bin_centres(bins, sampling_rate, low_hz)
    gain_F = torch.from_numpy(-_STOP_BAND_DB * LOG_ENERGY_PER_DB * (hz_F > cutoff_hz))
    level = rng.uniform(*_SAMPLE_NOISE)
    noise_TF = torch.from_numpy(level + np.log(rng.gamma(4.0, 0.25, size=(frames, bins))))
    return torch.logaddexp(features_TF + gain_F.float(), noise_TF.float())


def _bin_centres(bins: int, sampling_rate: int, low_hz: float) -> tuple[np.ndarray, np.ndarray]:
    """The centres of the mel bins, in mel and in Hz."""
    high_hz = sampling_rate / 2 - 400.0
    mel_F = np.linspace(_mel(low_hz), _mel(high_hz), bins + 2)[1:-1]
    return mel_F, 700.0 * (np.exp(mel_F / 1127.0) - 1.0)


def _mel(hz: float | np.ndarray) -> np.ndarray:
    return 1127.0 * np.log1p(np.asarray(hz) / 700.0)


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
