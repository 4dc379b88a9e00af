"""Checks the samples that a program passes, and brings them to the rate of the models: whole
recordings, and live streams.

Axes: S samples, C channels.
"""

from __future__ import annotations

import logging
import numbers
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pruned_rnnt.data.audio.audio_file import rate_problem
from pruned_rnnt.data.audio.audio_stream import ResampledStream
from pruned_rnnt.data.audio.features import (
    FBANK,
    FRAME_SAMPLES,
    MIN_SAMPLES,
    SAMPLING_RATE,
    WINDOW_END,
    FeatureKind,
)
from pruned_rnnt.data.audio.waveform import FloatArray, resample

logger = logging.getLogger(__name__)

# Silence and the largest amplitude of each type of integers.
_INTEGERS: dict[npt.DTypeLike, tuple[int, int]] = {
    np.dtype("int8"): (0, 2**7),
    np.dtype("uint8"): (2**7, 2**7),
    np.dtype("int16"): (0, 2**15),
    np.dtype("int32"): (0, 2**31),
}
_FLOATS = frozenset(np.dtype(name) for name in ("float16", "float32", "float64"))
# Filters and codecs exceed 1 by little; no audio is 24 dB above full scale.
_LARGEST = 16.0
# Digital silence kept before the first sound: 0.2 s.
_SILENCE = SAMPLING_RATE // 5
MOST_CHANNELS = 32
_LONGEST_GAP = 60.0


def samples_at_16_khz(audio: Any, sampling_rate: float) -> FloatArray:
    """Samples (S,) float32 at 16 kHz in [-1, 1].

    Args:
        audio: an array or tensor (S,), of floats in [-1, 1], or of int8, int16, int32 or uint8,
            which are divided by their range as wav files store them.
        sampling_rate: in Hz.

    Raises:
        ValueError: another shape, type, range or rate, no samples, or NaN or infinite ones.
    """
    given_S = _sample_array(audio)
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
    samples_S = _scaled(given_S)
    rate = _whole_rate(sampling_rate)
    if not np.isfinite(samples_S).all():
        raise ValueError("audio has NaN or infinite samples")
    largest = float(np.abs(samples_S).max())
    if largest > _LARGEST:
        raise _too_large(largest)
    return resample(samples_S, rate, SAMPLING_RATE)


def _sample_array(audio: Any) -> npt.NDArray[Any]:
    """Samples as they are given; raises ValueError for what is no array."""
    if isinstance(audio, bytes | bytearray):
        raise ValueError(
            f"audio is {type(audio).__name__}, needs an array of samples: of 16-bit integers, "
            "np.frombuffer(audio, dtype=np.int16)"
        )
    try:
        if not isinstance(audio, Tensor):
            return np.asarray(audio)
        # numpy has no bfloat16.
        host = audio.detach().cpu()
        return (host.float() if host.dtype == torch.bfloat16 else host).numpy()
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ValueError(f"audio is no array of samples: {error}") from error


def _scaled(given: npt.NDArray[Any]) -> FloatArray:
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


def _too_large(largest: float) -> ValueError:
    return ValueError(
        f"audio has samples up to {largest:g}, needs floats in [-1, 1]: divide by the range of the "
        "integers that they were"
    )


def _whole_rate(sampling_rate: float) -> int:
    """A sampling rate in Hz; raises ValueError for one that is no whole number or out of bounds."""
    if not isinstance(sampling_rate, numbers.Real) or sampling_rate % 1 != 0:  # or NaN
        raise ValueError(f"sampling_rate is {sampling_rate!r}, needs a whole number of Hz")
    rate = int(sampling_rate)
    if problem := rate_problem(rate):
        raise ValueError(problem)
    return rate


class LiveAudio:
    """The samples of one live stream; a window has those of some feature frames.

    Digital silence at the beginning is dropped: training data always has some noise, and some
    models emit words for silence without any. Memory grows only with samples that `advance` has not
    passed yet.

    Args:
        kind: `fbank`, whose features see the samples mirrored at both ends, or `nemo`, whose see
            zeros there.

    Attributes:
        begin: seconds of silence dropped at the beginning.
        replaced: number of NaN and infinite samples, which became 0.
        clipped: number of samples that were outside [-1, 1].
    """

    def __init__(self, kind: FeatureKind = FBANK) -> None:
        self.begin = 0.0
        self._mirrors = kind.name == "fbank"
        self._frames_before = kind.frames_before
        self.replaced = self.clipped = 0
        self._resampler = ResampledStream(SAMPLING_RATE, SAMPLING_RATE)
        # From `frames_before` the next frame on; before the first, what its features see there.
        self._parts: list[FloatArray] = []
        self._size = 0
        self._has_sound = self._has_begun = self._ended = False
        self._silent = 0  # samples of digital silence before the first sound

    def accept(self, samples: Any, sampling_rate: float) -> None:
        """Append samples.

        NaN and infinite samples become 0, and others are clipped to [-1, 1]; each is logged once.

        Args:
            samples: an array or tensor (S,), or (S, C), whose channels are averaged; types as for
                `samples_at_16_khz`; S may be 0.
            sampling_rate: in Hz, a whole number; it may change from call to call.

        Raises:
            ValueError: another shape, type or rate; or floating-point samples that are mostly
                outside [-1, 1]. The stream stays as it was.
        """
        rate = _whole_rate(sampling_rate)
        samples_SC = self._clean(_channels(samples))
        if rate != self._resampler.rates[0]:
            self._append(self._resampler.finish())
            self._resampler = ResampledStream(rate, SAMPLING_RATE)
        if len(samples_SC):
            # A mean takes longer than everything else that happens to a packet.
            mono_S: FloatArray = samples_SC[:, 0]
            if samples_SC.shape[1] > 1:
                mono_S = samples_SC.mean(axis=1)
            self._append(self._resampler.accept(mono_S))

    def gap(self, seconds: float) -> None:
        """Append silence in place of audio that was lost.

        Raises:
            ValueError: seconds is no number, negative or above 60.
        """
        if not isinstance(seconds, numbers.Real):
            raise ValueError(
                f"gap is {seconds!r}, needs a number of seconds from 0 to {_LONGEST_GAP:.0f}"
            )
        if not 0 <= seconds <= _LONGEST_GAP:
            raise ValueError(
                f"gap is {seconds} s, needs 0 to {_LONGEST_GAP:.0f}: finish the stream and start "
                "another one after a longer gap"
            )
        rate = self._resampler.rates[0]
        self.accept(np.zeros(round(seconds * rate), dtype=np.float32), rate)

    def finish(self) -> None:
        """End the stream."""
        self._append(self._resampler.finish())
        self._ended = True
        if not self._has_sound:
            self.begin = self._silent / SAMPLING_RATE
        if self._has_sound and not self._has_begun:
            missing = max(0, MIN_SAMPLES - self._size) if self._mirrors else 0
            self._begin(np.pad(self._joined(), (0, missing)))

    @property
    def frames(self) -> int:
        """Feature frames that can be computed now, from the next one on."""
        if not self._has_begun:
            return 0
        if self._ended:
            rounding = FRAME_SAMPLES // 2 if self._mirrors else 0
            return max(0, (self._size + rounding) // FRAME_SAMPLES - self._frames_before)
        return max(0, (self._size - WINDOW_END) // FRAME_SAMPLES + 1 - self._frames_before)

    def window(self, frames: int) -> FloatArray:
        """Samples (S,) of the `frames_before` to leave out, and of the next `frames` frames."""
        last = self._frames_before + frames - 1
        return self._joined()[: FRAME_SAMPLES * last + WINDOW_END]

    def advance(self, frames: int) -> None:
        """Pass the next frames, as far as there are any."""
        joined_S = self._joined()[FRAME_SAMPLES * frames :]
        self._parts, self._size = [joined_S], len(joined_S)

    def _joined(self) -> FloatArray:
        if len(self._parts) != 1:
            self._parts = [np.concatenate([np.zeros(0, dtype=np.float32), *self._parts])]
        return self._parts[0]

    def _append(self, samples_S: FloatArray) -> None:
        if not self._has_sound:
            samples_S = self._without_silence(samples_S)
        if len(samples_S):
            self._parts.append(samples_S)
            self._size += len(samples_S)
        if not self._has_begun and self._size > WINDOW_END:
            self._begin(self._joined())

    def _without_silence(self, samples_S: FloatArray) -> FloatArray:
        """The samples from 0.2 s before the first sound on; none before there is one."""
        sounds = np.flatnonzero(samples_S)
        if not len(sounds):
            self._silent += len(samples_S)
            return samples_S[:0]
        self._has_sound = True
        silent = self._silent + int(sounds[0])
        dropped = max(0, silent - _SILENCE) // FRAME_SAMPLES * FRAME_SAMPLES
        self.begin = dropped / SAMPLING_RATE
        kept_S = np.zeros(silent - dropped, dtype=np.float32)
        return np.concatenate((kept_S, samples_S[sounds[0] :]))

    def _begin(self, samples_S: FloatArray) -> None:
        """Start the samples after those that the features see before their beginning."""
        before = FRAME_SAMPLES * self._frames_before
        before_S = samples_S[:before][::-1] if self._mirrors else np.zeros(before, np.float32)
        self._parts = [np.concatenate((before_S, samples_S))]
        self._size = len(self._parts[0])
        self._has_begun = True

    def _clean(self, samples_SC: FloatArray) -> FloatArray:
        magnitudes = np.abs(samples_SC)
        if not samples_SC.size or magnitudes.max() <= 1:  # False for NaN
            return samples_SC
        finite = np.isfinite(samples_SC)
        beyond = finite & (magnitudes > 1)
        if beyond.mean() > 0.5 and magnitudes[beyond].max() > _LARGEST:
            raise _too_large(float(magnitudes[beyond].max()))
        for count, before, what in (
            (int((~finite).sum()), self.replaced, "NaN or infinite samples, which become silence"),
            (int(beyond.sum()), self.clipped, "samples outside [-1, 1], which are clipped"),
        ):
            if count and not before:
                logger.warning("a stream has %s; this is logged once for each stream", what)
        self.replaced += int((~finite).sum())
        self.clipped += int(beyond.sum())
        cleaned_SC: FloatArray = np.where(finite, samples_SC, np.float32(0)).clip(-1, 1)
        return cleaned_SC


def _channels(samples: Any) -> FloatArray:
    """(S, C) float32 samples."""
    array = _sample_array(samples)
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2 or not 1 <= array.shape[1] <= MOST_CHANNELS:
        raise ValueError(
            f"audio has the shape {array.shape}, needs (S,), or (S, C) with at most "
            f"{MOST_CHANNELS} channels"
        )
    return _scaled(array)
