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

from pruned_rnnt.data.audio.audio_stream import FeatureStream, audio_blocks
from pruned_rnnt.data.audio.features import SAMPLING_RATE, frame_count
from pruned_rnnt.data.audio.waveform import FloatArray, resample
from pruned_rnnt.decode.frame_times import FEATURE_SECONDS
from pruned_rnnt.transcribe.segments import AudioPiece, Segment, Segmenter

# A file, or (S,) samples.
Audio = Path | str | FloatArray
AudioList = list[Any] | tuple[Audio, ...]


class WholeRecording(NamedTuple):
    """(S,) samples at 16 kHz of a recording that need not be cut; without features yet."""

    samples_S: FloatArray


class RecordingReader:
    """Iterates over the segments of a recording, and reads it meanwhile.

    A recording that need not be cut is one `WholeRecording`.

    Args:
        audio: a file; or (S,) samples of one channel; or (T, F) features.
        sampling_rate: of samples, in Hz.
        segmenter: cuts the recording.
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
        segmenter: Segmenter,
        *,
        on_seconds: Callable[[float], None] | None = None,
    ) -> None:
        self.frames = 0
        self._audio = audio
        self._sampling_rate = sampling_rate
        self._segmenter = segmenter
        self._on_seconds = on_seconds

    def __iter__(self) -> Iterator[Segment | WholeRecording]:
        if isinstance(self._audio, Tensor):
            piece = AudioPiece(np.zeros(0, dtype=np.float32), self._audio)
            yield from self._segmenter(self._counted([piece]))
            return
        blocks = _blocks(self._audio, self._sampling_rate)
        begin: list[FloatArray] = []
        for block_S in blocks:
            begin.append(block_S)
            self.frames = frame_count(sum(map(len, begin)))
            if self.frames > self._segmenter.lengths.longest:
                break
        else:
            if self._on_seconds is not None:
                self._on_seconds(self.frames * FEATURE_SECONDS)
            yield WholeRecording(np.concatenate(begin))
            return
        self.frames = 0
        yield from self._segmenter(self._counted(_pieces(chain(begin, blocks))))

    def _counted(self, pieces: Iterable[AudioPiece]) -> Iterator[AudioPiece]:
        """The pieces, whose frames are counted and reported."""
        for piece in pieces:
            self.frames += len(piece.features_TF)
            yield piece
            if self._on_seconds is not None:
                self._on_seconds(self.frames * FEATURE_SECONDS)


def _blocks(audio: Audio, sampling_rate: int) -> Iterator[FloatArray]:
    """The sample blocks (S,) at 16 kHz of a file, or of samples at a rate in Hz."""
    if isinstance(audio, str | Path):
        return audio_blocks(audio)
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
