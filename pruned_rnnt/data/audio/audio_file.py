"""Reads audio files of all supported formats, block by block or whole: one channel at 16 kHz.

Axes: S samples, C channels.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pruned_rnnt.data.audio.decoder_messages import without_decoder_messages
from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.data.audio.ffmpeg_audio import open_with_ffmpeg
from pruned_rnnt.data.audio.truncation import describe_truncation
from pruned_rnnt.data.audio.waveform import FloatArray, Pcm16Array, resample

AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".m4a", ".aac", ".wma", ".webm", ".sph")
# Formats that libsndfile cannot read.
_FFMPEG_SUFFIXES = (".m4a", ".aac", ".wma", ".webm")
# No device records speech at rates outside these bounds. If a rate has no common divisor with
# 16 kHz, resampling needs memory in proportion to it: 600 MB at the upper bound.
LOWEST_RATE = 1000
HIGHEST_RATE = 768_000
# libsndfile returns the largest possible number of frames for an unknown length.
_UNKNOWN_FRAMES = 2**62


class AudioFile(Protocol):
    """An open file: its sampling rate in Hz, and its samples."""

    @property
    def sampling_rate(self) -> int: ...

    def blocks(self, size: int) -> Iterator[FloatArray]:
        """(S, C) float32 blocks of about `size` samples, none empty."""

    def pcm16(self, most: int) -> Pcm16Array | None:
        """The (S,) samples as they are stored; None, and nothing read, for files of other than one
        channel of 16-bit integers, without samples, or with more than `most`."""

    def truncation(self) -> str:
        """How the file ends before its header says, once it has been read; empty if it does not."""


@contextmanager
def open_audio(path: Path | str) -> Iterator[AudioFile]:
    """Opens a wav, flac, ogg, opus, mp3 or sph file, or through ffmpeg an m4a, aac, wma or webm.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an audio file, or the rate is out of bounds. Reading the blocks raises it
            too if the file is damaged.
    """
    path = Path(path)
    if path.is_dir():
        raise FileNotFoundError(f"audio file not found: {path} is a folder")
    if not path.is_file():
        raise FileNotFoundError(f"audio file not found: {path}")
    opened = open_with_ffmpeg if path.suffix.lower() in _FFMPEG_SUFFIXES else _open_with_libsndfile
    with opened(path) as file:
        if rate_problem(file.sampling_rate):
            raise ValueError(f"{path}: {rate_problem(file.sampling_rate)}")
        yield file


def seconds_in_header(path: Path) -> int | None:
    """The length of a file in seconds according to its header; None if the header has none."""
    import soundfile

    if path.suffix.lower() in _FFMPEG_SUFFIXES or not path.is_file():
        return None
    try:
        with without_decoder_messages():
            info = soundfile.info(path)
    except soundfile.LibsndfileError:
        return None
    known = 0 < info.frames < _UNKNOWN_FRAMES and not rate_problem(info.samplerate)
    return int(info.frames / info.samplerate) if known else None


def rate_problem(rate: float) -> str:
    """An error message if a sampling rate in Hz is out of bounds, else ""."""
    if LOWEST_RATE <= rate <= HIGHEST_RATE:
        return ""
    return f"sampling rate is {rate:,} Hz, needs {LOWEST_RATE:,} to {HIGHEST_RATE:,} Hz"


class _SoundFile:
    def __init__(self, file: Any, path: Path) -> None:
        self._file = file
        self._path = path
        self._read = 0
        self.sampling_rate = int(file.samplerate)

    def blocks(self, size: int) -> Iterator[FloatArray]:
        while True:
            with without_decoder_messages(self._file.format in ("MP3", "MPEG")):
                block_SC = self._file.read(size, dtype="float32", always_2d=True)
            if not len(block_SC):
                return
            self._read += len(block_SC)
            yield block_SC

    def truncation(self) -> str:
        stated = int(self._file.frames)
        if self._read < stated < _UNKNOWN_FRAMES:
            return f"it has {self._read:,} of {stated:,} samples"
        return describe_truncation(self._path)

    def pcm16(self, most: int) -> Pcm16Array | None:
        file = self._file
        if file.subtype != "PCM_16" or file.channels != 1 or not 0 < file.frames <= most:
            return None
        samples_S: Pcm16Array = file.read(file.frames, dtype="int16")
        self._read = len(samples_S)
        return samples_S


@contextmanager
def _open_with_libsndfile(path: Path) -> Iterator[AudioFile]:
    import soundfile

    try:
        with without_decoder_messages():
            file = soundfile.SoundFile(path)
        with file:
            yield _SoundFile(file, path)
    except soundfile.LibsndfileError as error:
        reason = error.error_string or "it is truncated or damaged"
        raise ValueError(f"{path} cannot be read as audio: {reason}") from error


logger = logging.getLogger(__name__)

# Samples to read at a time.
_BLOCK = 2**20


def read_audio(path: Path | str) -> FloatArray:
    """Reads a whole file: (S,) float32 at 16 kHz, channels averaged.

    A file that ends before its header says is logged as a warning.

    Raises:
        FileNotFoundError, ValueError: as `open_audio`; ValueError also for an empty file and for
            samples that are not finite.
    """
    with open_audio(path) as file:
        parts = [mono(block_SC, path) for block_SC in file.blocks(_BLOCK)]
        rate, truncation = file.sampling_rate, file.truncation()
    if truncation:
        logger.warning("%s is truncated: %s", path, truncation)
    if not parts:
        raise ValueError(f"{path} has no samples")
    return resample(np.concatenate(parts), rate, SAMPLING_RATE)


def mono(samples_SC: FloatArray, path: Path | str) -> FloatArray:
    """(S, C) -> (S,), channels averaged; ValueError naming the file if samples are not finite."""
    # The mean of one channel takes as long as decoding.
    is_mono = samples_SC.shape[1] == 1
    samples_S: FloatArray = samples_SC[:, 0] if is_mono else samples_SC.mean(axis=1)
    if not np.isfinite(samples_S).all():
        raise ValueError(f"{path} has NaN or infinite samples")
    return samples_S
