"""The input of transcription: files or samples, as pieces with their features.

Axes: S samples, T feature frames, F mel bins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pruned_rnnt.data.audio.audio_stream import FeatureStream, audio_blocks
from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.data.audio.waveform import FloatArray, resample
from pruned_rnnt.decode.frame_times import FEATURE_SECONDS
from pruned_rnnt.transcribe.segments import AudioPiece

# A file, or (S,) samples.
Audio = Path | str | FloatArray
AudioList = list[Any] | tuple[Audio, ...]


def read_recording(audio: Audio, sampling_rate: int) -> Iterable[AudioPiece]:
    """The pieces of a file, or of (S,) samples of one channel at a rate in Hz.

    Raises:
        FileNotFoundError, ValueError: as `pruned_rnnt.data.audio.load_audio.read_audio`, also
            while the pieces are read; ValueError also for samples of another shape.
    """
    if isinstance(audio, str | Path):
        return _pieces(audio_blocks(audio))
    return _pieces([_samples(audio, sampling_rate)])


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


class FrameCounter:
    """Iterates over pieces, counts their frames and reports the seconds read."""

    def __init__(
        self, pieces: Iterable[AudioPiece], on_seconds: Callable[[float], None] | None
    ) -> None:
        self._pieces = pieces
        self._on_seconds = on_seconds
        self.frames = 0

    def __iter__(self) -> Iterator[AudioPiece]:
        for piece in self._pieces:
            self.frames += len(piece.features_TF)
            yield piece
            if self._on_seconds is not None:
                self._on_seconds(self.frames * FEATURE_SECONDS)
