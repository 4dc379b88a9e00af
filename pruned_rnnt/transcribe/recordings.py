"""The input of transcription: files or samples, cut into segments.

Axes: S samples, T feature frames, F mel bins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from pruned_rnnt.data.audio.audio_stream import FeatureStream, short_or_blocks
from pruned_rnnt.data.audio.features import SAMPLING_RATE, frame_count, most_samples
from pruned_rnnt.data.audio.waveform import FloatArray, Pcm16Array, resample
from pruned_rnnt.decode.frame_times import FEATURE_SECONDS
from pruned_rnnt.transcribe.segments import (
    AudioPiece,
    Segment,
    Segmenter,
    SegmentLengths,
    SpeechDetector,
)

# A file, or (S,) samples.
Audio = Path | str | FloatArray
AudioList = list[Any] | tuple[Audio, ...]


class WholeRecording(NamedTuple):
    """(S,) samples at 16 kHz of a recording that need not be cut; without features yet."""

    samples_S: FloatArray | Pcm16Array


class RecordingReader:
    """Iterates over the segments of a recording, and reads it meanwhile.

    A recording that need not be cut is one `WholeRecording`.

    Args:
        audio: a file; or (S,) samples of one channel; or (T, F) features.
        sampling_rate: of samples, in Hz.
        lengths: of segments.
        new_detector: makes the detector of speech for a recording that is cut.
        on_seconds: called with the seconds read so far.

    Attributes:
        frames: feature frames read so far.

    Raises:
        FileNotFoundError, ValueError: while iterating, as
            `pruned_rnnt.data.audio.load_audio.read_audio`; ValueError also for samples of another
            shape.
    """

    def __init__(
        self,
        audio: Audio | Tensor,
        sampling_rate: int,
        lengths: SegmentLengths,
        new_detector: Callable[[], SpeechDetector],
        *,
        on_seconds: Callable[[float], None] | None = None,
    ) -> None:
        self.frames = 0
        self._audio = audio
        self._sampling_rate = sampling_rate
        self._lengths = lengths
        self._new_detector = new_detector
        self._on_seconds = on_seconds

    def __iter__(self) -> Iterator[Segment | WholeRecording]:
        if isinstance(self._audio, Tensor):
            piece = AudioPiece(np.zeros(0, dtype=np.float32), self._audio)
            yield from self._segmenter()(self._counted([piece]))
            return
        longest = self._lengths.longest
        blocks = _blocks(self._audio, self._sampling_rate, most_samples(longest))
        begin = []
        for block_S in blocks:
            begin.append(block_S)
            self.frames = frame_count(sum(map(len, begin)))
            if self.frames > longest:
                break
        else:
            if self._on_seconds is not None:
                self._on_seconds(self.frames * FEATURE_SECONDS)
            yield WholeRecording(begin[0] if len(begin) == 1 else np.concatenate(begin))
            return
        self.frames = 0
        yield from self._segmenter()(self._counted(_pieces(chain(begin, blocks))))

    def _segmenter(self) -> Segmenter:
        return Segmenter(self._lengths, self._new_detector())

    def _counted(self, pieces: Iterable[AudioPiece]) -> Iterator[AudioPiece]:
        """The pieces, whose frames are counted and reported."""
        for piece in pieces:
            self.frames += len(piece.features_TF)
            yield piece
            if self._on_seconds is not None:
                self._on_seconds(self.frames * FEATURE_SECONDS)


def _blocks(audio: Audio, sampling_rate: int, most: int) -> Iterator[Any]:
    """The sample blocks (S,) at 16 kHz of a file, or of samples at a rate in Hz.

    Files of at most `most` samples may be one block of integers, see `short_or_blocks`.
    """
    if isinstance(audio, str | Path):
        return short_or_blocks(audio, most)
    return iter([_samples(audio, sampling_rate)])


def _samples(audio: FloatArray, sampling_rate: int) -> FloatArray:
    """Samples (S,) at 16 kHz.

    Raises:
        ValueError: another shape, no samples, or NaN or infinite ones.
    """
    samples_S = np.asarray(audio, dtype=np.float32)
    if samples_S.ndim != 1 or not samples_S.size:
        raise ValueError(
            f"audio has the shape {samples_S.shape}, needs (S,) samples of one channel: average "
            "the channels, or pass a list for several recordings"
        )
    if not np.isfinite(samples_S).all():
        raise ValueError("audio has NaN or infinite samples")
    return resample(samples_S, sampling_rate, SAMPLING_RATE)


def _pieces(blocks: Iterable[FloatArray]) -> Iterator[AudioPiece]:
    """Sample blocks (S,) at 16 kHz with the features that are complete with them."""
    stream = FeatureStream()
    for block_S in blocks:
        yield AudioPiece(block_S, stream.accept(block_S))
    yield AudioPiece(np.zeros(0, dtype=np.float32), stream.finish())
