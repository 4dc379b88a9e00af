"""Audio of any length, piece by piece, as it would come at once: blocks, 16 kHz, features.

Axes: S samples, T feature frames, F mel bins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pruned_rnnt.data.audio.audio_file import open_audio
from pruned_rnnt.data.audio.features import FEATURE_DIM, SAMPLING_RATE
from pruned_rnnt.data.audio.load_audio import audio_features, mono
from pruned_rnnt.data.audio.waveform import FloatArray, resample

_SHIFT = SAMPLING_RATE // 100
# A frame of 25 ms lies around the middle of its 10 ms: it ends so many samples after its start.
_REACH = _SHIFT // 2 + SAMPLING_RATE // 80
# Reach of scipy's resampling filter, in samples of the lower of the two rates.
_FILTER_REACH = 10


def audio_blocks(path: Path | str, seconds: float = 10.0) -> Iterator[FloatArray]:
    """Samples of a file at 16 kHz, channels averaged, of which only a block is held at a time.

    Raises:
        FileNotFoundError, ValueError: as `pruned_rnnt.data.audio.load_audio.read_audio`.
    """
    with open_audio(path) as file:
        stream = ResampledStream(file.sampling_rate, SAMPLING_RATE)
        empty = True
        for block_SC in file.blocks(max(1, round(seconds * file.sampling_rate))):
            empty = False
            yield stream.accept(mono(block_SC, path))
        if empty:
            raise ValueError(f"{path} has no samples")
        yield stream.finish()


def feature_pieces(blocks: Iterable[FloatArray]) -> Iterator[Tensor]:
    """Blocks (S,) of a stream at 16 kHz to pieces (T, F) of its features."""
    stream = FeatureStream()
    for block_S in blocks:
        yield stream.accept(block_S)
    yield stream.finish()


class ResampledStream:
    """Samples of a stream to another rate, the same as `resample` gives for the whole."""

    def __init__(self, source_rate: int, target_rate: int) -> None:
        self.rates = (source_rate, target_rate)
        ratio = Fraction(target_rate, source_rate)
        self._up, self._down = ratio.numerator, ratio.denominator
        self._reach = _FILTER_REACH * max(self._up, self._down)
        self._samples_S = np.zeros(0, dtype=np.float32)
        self._first = 0  # in units of `down` samples: where the kept samples begin
        self._done = 0  # samples given out

    def accept(self, samples_S: FloatArray) -> FloatArray:
        """(S,) float32 -> the samples which are settled now, perhaps none."""
        if self._up == self._down:
            return samples_S
        self._samples_S = np.concatenate((self._samples_S, samples_S))
        heard = self._first * self._down + len(self._samples_S)
        # Sample m hears those k for which |m down - k up| is within the filter's reach.
        settled = max(self._done, (heard * self._up - self._reach - 1) // self._down + 1)
        return self._resampled(settled)

    def finish(self) -> FloatArray:
        """The samples at the end of the stream."""
        if self._up == self._down or not len(self._samples_S):
            return np.zeros(0, dtype=np.float32)
        heard = self._first * self._down + len(self._samples_S)
        return self._resampled(-(-heard * self._up // self._down))

    def _resampled(self, end: int) -> FloatArray:
        """Samples up to `end`; drops what no later one hears."""
        if end <= self._done:
            return np.zeros(0, dtype=np.float32)
        begin = self._first * self._up
        new_S = resample(self._samples_S, *self.rates)[self._done - begin : end - begin]
        self._done = end
        drop = max(0, (end * self._down - self._reach) // self._up // self._down - self._first)
        self._samples_S = self._samples_S[drop * self._down :]
        self._first += drop
        return new_S


class FeatureStream:
    """Samples of a stream to feature frames, the same as of the whole audio at once."""

    def __init__(self) -> None:
        self._samples_S = np.zeros(0, dtype=np.float32)
        self._first_frame = 0  # the frame at which the kept samples begin
        self._done = 0  # frames given out

    def accept(self, samples_S: FloatArray) -> Tensor:
        """(S,) float32 at 16 kHz -> the (T, F) frames which are complete now, perhaps none."""
        self._samples_S = np.concatenate((self._samples_S, samples_S))
        kept = len(self._samples_S)
        complete = self._first_frame + max(0, (kept - _REACH) // _SHIFT + 1)
        if complete <= self._done:
            return torch.zeros(0, FEATURE_DIM)
        features_TF = audio_features(self._samples_S)
        new_TF = features_TF[self._done - self._first_frame : complete - self._first_frame]
        # One frame more than needed stays, so that no later frame is at an edge.
        drop = max(0, complete - 1 - self._first_frame)
        self._samples_S = self._samples_S[drop * _SHIFT :]
        self._first_frame += drop
        self._done = complete
        return new_TF

    def finish(self) -> Tensor:
        """The (T, F) frames at the end of the stream, which look beyond its last sample."""
        if not len(self._samples_S):
            return torch.zeros(0, FEATURE_DIM)
        features_TF = audio_features(self._samples_S)
        return features_TF[self._done - self._first_frame :]
