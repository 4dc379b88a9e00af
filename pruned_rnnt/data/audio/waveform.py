"""Changes waveforms: channels, resampling, speed, tempo, level and noise.

Axes: S audio samples, C channels.
"""

from __future__ import annotations

import logging
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.float32]
# Integers of 16 bits: 2**15 times the samples.
Pcm16Array = npt.NDArray[np.int16]
# Of one voice in all channels, at any levels, the mean has all of the energy that it can have; of
# two equally loud voices, one in each channel, half of it.
_SAME_ENERGY = 0.8
# The energy of a sample at -60 dB of full scale. In pauses, channels have noise of their own.
_QUIET = 1e-6
_named_different = False  # the warning comes once in a process


def as_floats(samples_S: FloatArray | Pcm16Array) -> FloatArray:
    """A copy in [-1, 1]."""
    floats_S: FloatArray = samples_S.astype(np.float32)
    if samples_S.dtype == np.int16:
        floats_S *= 2**-15
    return floats_S


def mono(samples_SC: FloatArray, path: Path | str, channel: int | None = None) -> FloatArray:
    """(S, C) -> (S,): one channel, counted from 0, or the mean of all.

    The first mean of channels that are not alike is logged as a warning.

    Raises:
        ValueError: naming the file: it lacks the channel, or samples are not finite.
    """
    channels = samples_SC.shape[1]
    if channel is not None and not 0 <= channel < channels:
        raise ValueError(
            f"{path} has no channel {channel}: its channels are 0 to {channels - 1}"
            if channels > 1
            else f"{path} has no channel {channel}: it has channel 0 only"
        )
    # The mean of one channel takes as long as decoding.
    takes_mean = channel is None and channels > 1
    samples_S: FloatArray = samples_SC.mean(axis=1) if takes_mean else samples_SC[:, channel or 0]
    if not np.isfinite(samples_S).all():
        raise ValueError(f"{path} has NaN or infinite samples")
    if takes_mean:
        _warn_if_different(samples_SC, samples_S, path)
    return samples_S


def _warn_if_different(samples_SC: FloatArray, mean_S: FloatArray, path: Path | str) -> None:
    global _named_different
    if _named_different:
        return
    energies_C = np.einsum("sc,sc->c", samples_SC, samples_SC, dtype=np.float64)
    most = np.sqrt(energies_C).mean() ** 2
    if most < _QUIET * len(mean_S):
        return
    if np.einsum("s,s->", mean_S, mean_S, dtype=np.float64) < _SAME_ENERGY * most:
        _named_different = True
        logger.warning(
            "%s has channels with different sound, and their mean is read, in which speakers "
            "overlap; `transcribe --channel 0` reads the first one. Only the first such file is "
            "named",
            path,
        )


def resample(samples_S: FloatArray, source_rate: int, target_rate: int) -> FloatArray:
    """Resamples with scipy's polyphase filter: S -> ceil(S * target / source)."""
    if source_rate == target_rate:
        return samples_S
    import scipy.signal  # takes as long as torch, and most audio has the rate of the model

    ratio = Fraction(target_rate, source_rate)
    up, down = ratio.numerator, ratio.denominator
    resampled_S = scipy.signal.resample_poly(samples_S, up, down, window=_low_pass(max(up, down)))
    return np.asarray(resampled_S, dtype=np.float32)


# A filter has 60 MB for rates without a common divisor, and clients of a service choose the rate.
@lru_cache(maxsize=8)
def _low_pass(factor: int) -> FloatArray:
    """The filter that scipy designs by default, which takes longer than a short block of audio."""
    import scipy.signal

    taps = scipy.signal.firwin(20 * factor + 1, 1 / factor, window=("kaiser", 5.0))
    return np.asarray(taps, dtype=np.float32)


def perturb_speed(samples_S: FloatArray, speed: float) -> FloatArray:
    """Plays the samples `speed` times as fast, which changes tempo, pitch and formants.

    `speed` is rounded to hundredths.
    """
    percent = round(speed * 100)
    return resample(samples_S, percent, 100)


def perturb_tempo(samples_S: FloatArray, tempo: float, sampling_rate: int) -> FloatArray:
    """Makes speech `tempo` times as fast at the same pitch.

    Overlap-add of 30 ms windows, each taken from the position that correlates best with the natural
    continuation of the previous one (WSOLA, Verhelst and Roelands 1993).
    """
    window = int(0.03 * sampling_rate) // 2 * 2
    hop, search = window // 2, window // 4
    if samples_S.size < 2 * window or tempo == 1.0:
        return samples_S
    taper_S = np.hanning(window + 1)[:window].astype(np.float32)
    frames = int((samples_S.size - window) / (hop * tempo))
    padded_S = np.pad(samples_S, (search, window + search + hop))
    output_S = np.zeros(frames * hop + window, dtype=np.float32)
    position = 0
    for frame in range(frames):
        if frame > 0:
            # The next window should resemble the natural continuation of the last one.
            wanted_S = padded_S[position + hop : position + hop + window]
            first = int(frame * hop * tempo)
            region_S = padded_S[first : first + window + 2 * search]
            position = first + int(np.argmax(np.correlate(region_S, wanted_S, mode="valid")))
        else:
            position = search
        output_S[frame * hop : frame * hop + window] += (
            padded_S[position : position + window] * taper_S
        )
    return output_S


def scale_to_level(samples_S: FloatArray, level_db: float) -> FloatArray:
    """Scales the root mean square to `level_db` dB of full scale; leaves silence unchanged.

    Lowers the level further if the peak would exceed 1.
    """
    power = float(np.mean(np.square(samples_S, dtype=np.float64)))
    if power == 0.0:
        return samples_S
    gain = 10.0 ** (level_db / 20.0) / np.sqrt(power)
    scaled_S = samples_S * np.float32(gain)
    peak = float(np.abs(scaled_S).max())
    return scaled_S / np.float32(peak) if peak > 1.0 else scaled_S


def add_white_noise(samples_S: FloatArray, level_db: float, rng: np.random.Generator) -> FloatArray:
    """Adds white noise of `level_db` dB of full scale (root mean square)."""
    noise_S = rng.standard_normal(samples_S.size, dtype=np.float32)
    return samples_S + noise_S * np.float32(10.0 ** (level_db / 20.0))
