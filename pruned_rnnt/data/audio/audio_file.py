"""Audio files of every kind, open for reading block by block.

Axes: S samples, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from pruned_rnnt.data.audio.decoder_messages import without_decoder_notes
from pruned_rnnt.data.audio.ffmpeg_audio import open_by_ffmpeg
from pruned_rnnt.data.audio.waveform import FloatArray

AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".m4a", ".aac", ".wma", ".webm", ".sph")
# What libsndfile does not read.
_FFMPEG_SUFFIXES = (".m4a", ".aac", ".wma", ".webm")
# Nothing that records speech has a rate outside these. Resampling takes memory in proportion to the
# rate where it has no divisor in common with 16 kHz: 600 MB at the highest.
LOWEST_RATE = 1000
HIGHEST_RATE = 768_000


class AudioFile(Protocol):
    """An open file: its sampling rate in Hz, and its samples."""

    @property
    def sampling_rate(self) -> int: ...

    def blocks(self, size: int) -> Iterator[FloatArray]:
        """(S, C) float32 blocks of about `size` samples, none empty."""


@contextmanager
def open_audio(path: Path | str) -> Iterator[AudioFile]:
    """An open wav, flac, ogg, opus, mp3 or sph file; m4a, aac, wma and webm through ffmpeg.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an audio file, one of an impossible rate, or, also while it is read, a
            broken one.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"audio file not found: {path}")
    opened = open_by_ffmpeg if path.suffix.lower() in _FFMPEG_SUFFIXES else _open_by_libsndfile
    with opened(path) as file:
        if rate_problem(file.sampling_rate):
            raise ValueError(f"{path}: {rate_problem(file.sampling_rate)}")
        yield file


def known_seconds(path: Path) -> int | None:
    """The length of a file by its header; None where only reading all of it would tell."""
    import soundfile

    if path.suffix.lower() in _FFMPEG_SUFFIXES or not path.is_file():
        return None
    try:
        with without_decoder_notes():
            info = soundfile.info(path)
    except soundfile.LibsndfileError:
        return None
    # libsndfile's "unknown" is the largest number of frames there can be.
    known = 0 < info.frames < 2**62 and not rate_problem(info.samplerate)
    return int(info.frames / info.samplerate) if known else None


def rate_problem(rate: float) -> str:
    """Why nothing can have this sampling rate in Hz; empty for one that can be."""
    if LOWEST_RATE <= rate <= HIGHEST_RATE:
        return ""
    return f"sampling rate is {rate:,} Hz, needs {LOWEST_RATE:,} to {HIGHEST_RATE:,} Hz"


class _SoundFile:
    def __init__(self, file: Any) -> None:
        self._file = file
        self.sampling_rate = int(file.samplerate)

    def blocks(self, size: int) -> Iterator[FloatArray]:
        while True:
            with without_decoder_notes(self._file.format in ("MP3", "MPEG")):
                block_SC = self._file.read(size, dtype="float32", always_2d=True)
            if not len(block_SC):
                return
            yield block_SC


@contextmanager
def _open_by_libsndfile(path: Path) -> Iterator[AudioFile]:
    import soundfile

    try:
        with without_decoder_notes():
            file = soundfile.SoundFile(path)
        with file:
            yield _SoundFile(file)
    except soundfile.LibsndfileError as error:
        raise ValueError(f"{path} cannot be read as audio: {error.error_string}") from error
