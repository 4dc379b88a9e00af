"""Samples that a program passes: checks them and brings them to the rate of the models.

Axes: S samples.
"""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pruned_rnnt.data.audio.audio_file import rate_problem
from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.data.audio.waveform import FloatArray, resample

# Silence and the largest amplitude of each type of integers.
_INTEGERS: dict[npt.DTypeLike, tuple[int, int]] = {
    np.dtype("int8"): (0, 2**7),
    np.dtype("uint8"): (2**7, 2**7),
    np.dtype("int16"): (0, 2**15),
    np.dtype("int32"): (0, 2**31),
}
_FLOATS = frozenset(np.dtype(name) for name in ("float16", "float32", "float64"))
# Filters and codecs exceed 1 by little; no audio is 24 dB above full scale.
LARGEST = 16.0


def samples_at_16_khz(audio: Any, sampling_rate: float) -> FloatArray:
    """Samples (S,) float32 at 16 kHz in [-1, 1].

    Args:
        audio: an array or tensor (S,), of floats in [-1, 1], or of int8, int16, int32 or uint8,
            which are divided by their range as wav files store them.
        sampling_rate: in Hz.

    Raises:
        ValueError: another shape, type, range or rate, no samples, or NaN or infinite ones.
    """
    given_S = sample_array(audio)
    if given_S.dtype == object:
        raise ValueError(
            f"audio is of type {type(audio).__name__}, needs a path, or an array or tensor (S,) of "
            "samples"
        )
    if given_S.ndim == 0:
        raise ValueError(
            "audio is a single number, needs an array or tensor (S,) of samples: a list is taken "
            "for several recordings"
        )
    if given_S.shape == (0,):
        raise ValueError("audio has no samples")
    if given_S.ndim != 1:
        raise ValueError(
            f"audio has the shape {given_S.shape}, needs (S,) samples of one channel: average "
            "the channels, or pass a list for several recordings"
        )
    samples_S = scaled(given_S)
    rate = whole_rate(sampling_rate)
    if not np.isfinite(samples_S).all():
        raise ValueError("audio has NaN or infinite samples")
    largest = float(np.abs(samples_S).max())
    if largest > LARGEST:
        raise too_large(largest)
    return resample(samples_S, rate, SAMPLING_RATE)


def sample_array(audio: Any) -> npt.NDArray[Any]:
    """Samples as they are given; raises ValueError for what is no array."""
    try:
        if not isinstance(audio, Tensor):
            return np.asarray(audio)
        # numpy has no bfloat16.
        host = audio.detach().cpu()
        return (host.float() if host.dtype == torch.bfloat16 else host).numpy()
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ValueError(f"audio is no array of samples: {error}") from error


def scaled(given: npt.NDArray[Any]) -> FloatArray:
    """Samples as float32: integers divided by their range, floats as they are.

    Raises:
        ValueError: another type.
    """
    kind = given.dtype.newbyteorder("=")
    if kind not in _FLOATS and kind not in _INTEGERS:
        names = ", ".join(str(integers) for integers in _INTEGERS)
        raise ValueError(
            f"audio has samples of {given.dtype.name}, needs floats in [-1, 1], or {names}"
        )
    with np.errstate(over="ignore"):  # becomes infinite
        samples = given.astype(np.float32)
    if kind in _INTEGERS:
        zero, largest = _INTEGERS[kind]
        samples = (samples - np.float32(zero)) / np.float32(largest)
    return samples


def too_large(largest: float) -> ValueError:
    return ValueError(
        f"audio has samples up to {largest:g}, needs floats in [-1, 1]: divide by the range of the "
        "integers that they were"
    )


def whole_rate(sampling_rate: float) -> int:
    """A sampling rate in Hz; raises ValueError for one that is no whole number or out of bounds."""
    if not isinstance(sampling_rate, numbers.Real) or sampling_rate % 1 != 0:  # or NaN
        raise ValueError(f"sampling_rate is {sampling_rate!r}, needs a whole number of Hz")
    rate = int(sampling_rate)
    if problem := rate_problem(rate):
        raise ValueError(problem)
    return rate
