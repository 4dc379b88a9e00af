"""Reads, resamples and computes features of audio of any length, block by block.

The concatenated results equal those of the whole audio.

Axes: S samples, T feature frames, F mel bins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pruned_rnnt.data.audio.audio_file import AudioFile, no_samples, open_audio
from pruned_rnnt.data.audio.features import (
    FEATURE_DIM,
    FRAME_SAMPLES,
    SAMPLING_RATE,
    WINDOW_END,
    audio_features,
)
from pruned_rnnt.data.audio.file_headers import short_wav
from pruned_rnnt.data.audio.waveform import FloatArray, Pcm16Array, mono, resample

# Of a file in memory.
_BLOCK_SECONDS = 10.0
# Half the length of scipy's resampling filter, in samples of the lower of the two rates.
_FILTER_HALF_LENGTH = 10


def short_or_blocks(
    path: Path | str,
    most: int,
    on_truncation: Callable[[str], None],
    channel: int | None = None,
) -> Iterator[Pcm16Array | FloatArray]:
    """Yields blocks of a file's samples at 16 kHz, channels averaged; one block is in memory. But a
    file of 16-bit integers with one channel at 16 kHz and at most `most` samples is one block (S,)
    as it is stored.

    on_truncation: called after the last block if the file ends before its header says; with how.
    channel: read instead of the mean.
    """
    # Samples as they are stored have no channel but 0.
    most = 0 if channel else most
    of_wav_S = short_wav(path, SAMPLING_RATE, most)
    if of_wav_S is not None:
        yield of_wav_S
        return
    with open_audio(path) as file:
        stored_S = file.pcm16(most) if file.sampling_rate == SAMPLING_RATE else None
        if stored_S is not None and len(stored_S):
            yield stored_S
        else:
            yield from _blocks(file, path, _BLOCK_SECONDS, channel)
        if truncation := file.truncation():
            on_truncation(truncation)


def _blocks(
    file: AudioFile, path: Path | str, seconds: float, channel: int | None = None
) -> Iterator[FloatArray]:
    stream = ResampledStream(file.sampling_rate, SAMPLING_RATE)
    empty = True
    for block_SC in file.blocks(max(1, round(seconds * file.sampling_rate))):
        empty = False
        yield stream.accept(mono(block_SC, path, channel))
    if empty:
        raise no_samples(path, file.truncation())
    yield stream.finish()


class ResampledStream:
    """Resamples a stream; the concatenated output equals `resample` of the whole signal.

    It resamples the kept samples, and outputs those that later input cannot change any more.
    """

    def __init__(self, source_rate: int, target_rate: int) -> None:
        self.rates = (source_rate, target_rate)
        ratio = Fraction(target_rate, source_rate)
        self._up, self._down = ratio.numerator, ratio.denominator
        self._half_length = _FILTER_HALF_LENGTH * max(self._up, self._down)
        self._samples_S = np.zeros(0, dtype=np.float32)
        self._first = 0  # start of the kept samples, in units of `down` samples
        self._done = 0  # number of output samples so far

    def accept(self, samples_S: FloatArray) -> FloatArray:
        """(S,) float32 -> the output samples that are final now, possibly none."""
        if self._up == self._down:
            return samples_S
        self._samples_S = np.concatenate((self._samples_S, samples_S))
        received = self._first * self._down + len(self._samples_S)
        # Output m depends on the inputs k with |m down - k up| <= half_length.
        final = max(self._done, (received * self._up - self._half_length - 1) // self._down + 1)
        return self._resampled(final)

    def finish(self) -> FloatArray:
        """The remaining output samples, at the end of the stream."""
        if self._up == self._down or not len(self._samples_S):
            return np.zeros(0, dtype=np.float32)
        received = self._first * self._down + len(self._samples_S)
        return self._resampled(-(-received * self._up // self._down))

    def _resampled(self, end: int) -> FloatArray:
        """Output samples up to `end`; drops input that later output does not depend on."""
        if end <= self._done:
            return np.zeros(0, dtype=np.float32)
        begin = self._first * self._up
        new_S = resample(self._samples_S, *self.rates)[self._done - begin : end - begin]
        self._done = end
        oldest = (end * self._down - self._half_length) // self._up // self._down
        drop = max(0, oldest - self._first)
        self._samples_S = self._samples_S[drop * self._down :]
        self._first += drop
        return new_S


class FeatureStream:
    """Computes the features of a stream; concatenated they equal those of the whole audio."""

    def __init__(self) -> None:
        self._samples_S = np.zeros(0, dtype=np.float32)
        self._first_frame = 0  # frame at which the kept samples start
        self._done = 0  # number of frames returned so far

    def accept(self, samples_S: FloatArray) -> Tensor:
        """(S,) float32 at 16 kHz -> the (T, F) frames that are complete now, possibly none."""
        self._samples_S = np.concatenate((self._samples_S, samples_S))
        kept = len(self._samples_S)
        complete = self._first_frame + max(0, (kept - WINDOW_END) // FRAME_SAMPLES + 1)
        if complete <= self._done:
            return torch.zeros(0, FEATURE_DIM)
        features_TF = audio_features(self._samples_S)
        new_TF = features_TF[self._done - self._first_frame : complete - self._first_frame]
        # Keep one frame more than necessary, so that no later frame is at the edge of the signal.
        drop = max(0, complete - 1 - self._first_frame)
        self._samples_S = self._samples_S[drop * FRAME_SAMPLES :]
        self._first_frame += drop
        self._done = complete
        return new_TF

    def finish(self) -> Tensor:
        """The (T, F) frames at the end of the stream, whose windows exceed its last sample."""
        if not len(self._samples_S):
            return torch.zeros(0, FEATURE_DIM)
        features_TF = audio_features(self._samples_S)
        return features_TF[self._done - self._first_frame :]
