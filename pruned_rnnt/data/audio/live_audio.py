"""The audio of a live stream: any samples in, windows of samples at 16 kHz for features out.

Axes: S samples, C channels.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from pruned_rnnt.data.audio.audio_stream import ResampledStream
from pruned_rnnt.data.audio.feature_kinds import FBANK, FeatureKind
from pruned_rnnt.data.audio.features import FRAME_SAMPLES, MIN_SAMPLES, SAMPLING_RATE
from pruned_rnnt.data.audio.samples import LARGEST, sample_array, scaled, too_large, whole_rate
from pruned_rnnt.data.audio.waveform import FloatArray

logger = logging.getLogger(__name__)

# Samples from the start of a frame to the end of its window of 25 ms; NeMo's ends 5 ms earlier.
_WINDOW_END = FRAME_SAMPLES // 2 + SAMPLING_RATE // 80
# Digital silence kept before the first sound: 0.2 s.
_SILENCE = SAMPLING_RATE // 5
MOST_CHANNELS = 32
_LONGEST_GAP = 60.0


class LiveAudio:
    """The samples of one stream; a window has those of some feature frames.

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
        rate = whole_rate(sampling_rate)
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
            ValueError: seconds is negative or above 60.
        """
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
        return max(0, (self._size - _WINDOW_END) // FRAME_SAMPLES + 1 - self._frames_before)

    def window(self, frames: int) -> FloatArray:
        """Samples (S,) of the `frames_before` to leave out, and of the next `frames` frames."""
        last = self._frames_before + frames - 1
        return self._joined()[: FRAME_SAMPLES * last + _WINDOW_END]

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
        if not self._has_begun and self._size > _WINDOW_END:
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
        if beyond.mean() > 0.5 and magnitudes[beyond].max() > LARGEST:
            raise too_large(float(magnitudes[beyond].max()))
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
    array = sample_array(samples)
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2 or not 1 <= array.shape[1] <= MOST_CHANNELS:
        raise ValueError(
            f"audio has the shape {array.shape}, needs (S,), or (S, C) with at most "
            f"{MOST_CHANNELS} channels"
        )
    return scaled(array)
