"""Reads audio files of all supported formats, block by block or whole: one channel at 16 kHz.

libsndfile decodes most formats, the program ffmpeg the others.

Axes: S samples, C channels.
"""

from __future__ import annotations

import logging
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import IO, Any, Protocol

import numpy as np

from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.data.audio.file_headers import describe_truncation
from pruned_rnnt.data.audio.mp3_length import mp3_states_its_length, with_mp3_length
from pruned_rnnt.data.audio.waveform import FloatArray, Pcm16Array, mono, resample

logger = logging.getLogger(__name__)

# Formats that libsndfile cannot read.
_FFMPEG_SUFFIXES = (".m4a", ".aac", ".wma", ".webm")
_MP3_SUFFIXES = (".mp3", ".mp2")
AUDIO_SUFFIXES = (
    *(".wav", ".flac", ".ogg", ".oga", ".opus", *_MP3_SUFFIXES, ".sph", ".aif", ".aiff", ".aifc"),
    *(".au", ".caf", ".w64", ".rf64", ".voc", *_FFMPEG_SUFFIXES),
)
# No device records speech at rates outside these bounds. If a rate has no common divisor with
# 16 kHz, resampling needs memory in proportion to it: 600 MB at the upper bound.
LOWEST_RATE = 1000
HIGHEST_RATE = 768_000
# libsndfile returns the largest possible number of frames for an unknown length.
UNKNOWN_FRAMES = 2**62
# libsndfile says that a file does not exist if it is named .mp3 and is none.
_NOT_FOUND = 7
# Samples to read at a time.
_BLOCK = 2**20
# Header of Sun's AU format: magic, offset of the samples, their size, encoding, rate, channels.
_AU_HEADER = struct.Struct(">4s5I")
_AU_FLOAT32 = 6
# The threads inside `without_decoder_messages` share one redirection: the first one
# in makes it, the last one out ends it. `_kept` is the standard error of before.
_lock = Lock()
_inside = 0
_kept = -1


class AudioFile(Protocol):
    """An open file: its sampling rate in Hz, and its samples."""

    @property
    def sampling_rate(self) -> int: ...

    def blocks(self, size: int) -> Iterator[FloatArray]:
        """(S, C) float32 blocks of about `size` samples, none empty; up to damage, if samples
        precede it, which `truncation` then describes."""

    def pcm16(self, most: int) -> Pcm16Array | None:
        """The (S,) samples as they are stored; None, and nothing read, for files of other than one
        channel of 16-bit integers, without samples, or with more than `most`."""

    def truncation(self) -> str:
        """How the file ends before its header says, once it has been read; empty if it does not."""


@contextmanager
def open_audio(path: Path | str) -> Iterator[AudioFile]:
    """Opens a file of the formats of `AUDIO_SUFFIXES`; m4a, aac, wma and webm through ffmpeg.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an audio file, or the rate is out of bounds. Reading the blocks raises it
            too if the file is damaged from the start, or if ffmpeg finds damage.
    """
    path = Path(path)
    if path.is_dir():
        raise FileNotFoundError(f"audio file not found: {path} is a folder")
    if path.exists() and not path.is_file():
        raise FileNotFoundError(
            f"audio file not found: {path} is a pipe or a device; save its audio in a file"
        )
    if not path.is_file():
        dead = ", a link to a file that does not exist" if path.is_symlink() else ""
        raise FileNotFoundError(f"audio file not found: {path}{dead}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} cannot be read as audio: the file is empty")
    opened = _open_with_ffmpeg if path.suffix.lower() in _FFMPEG_SUFFIXES else _open_with_libsndfile
    with opened(path) as file:
        if rate_problem(file.sampling_rate):
            raise ValueError(f"{path}: {rate_problem(file.sampling_rate)}")
        yield file


def seconds_in_header(path: Path) -> int | None:
    """The length of a file in seconds according to its header; None if the header has none, or the
    file cannot be read."""
    import soundfile

    try:
        if path.suffix.lower() in _FFMPEG_SUFFIXES or not path.is_file():
            return None
        with _sound_file(path) as file:
            frames, rate = file.frames, file.samplerate
    except (OSError, soundfile.LibsndfileError):
        return None
    known = 0 < frames < UNKNOWN_FRAMES and not rate_problem(rate)
    return int(frames / rate) if known else None


def _sound_file(path: Path) -> Any:
    """A file of a format that libsndfile reads."""
    import soundfile

    source = with_mp3_length(path)
    if isinstance(source, Path) and os.name == "posix":
        # soundfile cannot encode names with bytes that are no UTF-8.
        source = os.fsencode(source)
    with without_decoder_messages(is_mp3(path)):
        return soundfile.SoundFile(source)


def is_mp3(path: Path) -> bool:
    """Whether a file is mp3 by its name; libmpg123 may print messages while it decodes these."""
    return path.suffix.lower() in _MP3_SUFFIXES


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
        self._damage = ""
        self.sampling_rate = int(file.samplerate)
        self._is_mp3 = file.format in ("MP3", "MPEG")
        if file.frames >= UNKNOWN_FRAMES:
            # libsndfile cannot seek there, which soundfile does after each block.
            file.seekable = lambda: False

    def blocks(self, size: int) -> Iterator[FloatArray]:
        file = self._file
        while not self._damage:
            most = min(size, file.frames - self._read)
            block_SC = self._filled(np.empty((most, file.channels), dtype=np.float32))
            if not len(block_SC):
                return
            yield block_SC

    def _filled(self, block: Any) -> Any:
        """The next samples, in an array for them: fewer at the end of the file, and before damage.

        Raises:
            LibsndfileError: the file is damaged from the start.
        """
        import soundfile

        try:
            with without_decoder_messages(self._is_mp3):
                block = self._file.read(out=block)
        except soundfile.LibsndfileError as error:
            # What was decoded before is in the array.
            block = block[: max(0, self._file.tell() - self._read)]
            if not self._read and not len(block):
                raise
            self._damage = f"it cannot be read to its end: {error.error_string or error.code}"
        self._read += len(block)
        return block

    def truncation(self) -> str:
        stated = int(self._file.frames)
        is_short = self._read < stated < UNKNOWN_FRAMES
        if is_short and (not self._is_mp3 or mp3_states_its_length(self._path)):
            return f"it has {self._read:,} of {stated:,} samples"
        return self._damage or describe_truncation(self._path)

    def pcm16(self, most: int) -> Pcm16Array | None:
        file = self._file
        if file.subtype != "PCM_16" or file.channels != 1 or not 0 < file.frames <= most:
            return None
        samples_S: Pcm16Array = self._filled(np.empty(file.frames, dtype=np.int16))
        return samples_S


@contextmanager
def _open_with_libsndfile(path: Path) -> Iterator[AudioFile]:
    import soundfile

    try:
        with _sound_file(path) as file:
            yield _SoundFile(file, path)
    except soundfile.LibsndfileError as error:
        reason = error.error_string or "it is truncated or damaged"
        if error.code == _NOT_FOUND:
            reason = "Format not recognised."
        raise ValueError(f"{path} cannot be read as audio: {reason}") from error


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
    if not parts:
        raise no_samples(path, truncation)
    if truncation:
        logger.warning("%s is truncated: %s", path, truncation)
    return resample(np.concatenate(parts), rate, SAMPLING_RATE)


def no_samples(path: Path | str, truncation: str) -> ValueError:
    """The error of a file without samples, which may end before its header says."""
    return ValueError(f"{path} has no samples" + (f": {truncation}" if truncation else ""))


@dataclass(frozen=True)
class _DecodedFile:
    stream: IO[bytes]
    sampling_rate: int
    channels: int

    def blocks(self, size: int) -> Iterator[FloatArray]:
        frame = 4 * self.channels
        while data := self.stream.read(size * frame):
            whole = data[: len(data) // frame * frame]
            if whole:
                samples_SC = np.frombuffer(whole, dtype=">f4").reshape(-1, self.channels)
                yield samples_SC.astype(np.float32)

    def pcm16(self, most: int) -> None:
        """ffmpeg's output is float32."""

    def truncation(self) -> str:
        return ""  # ffmpeg itself raises an error


@contextmanager
def _open_with_ffmpeg(path: Path) -> Iterator[_DecodedFile]:
    """Decodes the first audio stream of a file, at its own rate and with all its channels.

    Raises:
        ValueError: ffmpeg is not installed, or there is no audio. Damaged audio raises it at the
            end of the file.
    """
    if shutil.which("ffmpeg") is None:
        kind = path.suffix.lower()
        raise ValueError(
            f"{path} cannot be read as audio: {kind} files need the program ffmpeg; install it"
        )
    # ffmpeg cannot mistake an absolute path for an option or a protocol. The whitelist prevents
    # connections that the contents of a file may ask for.
    arguments = ["-protocol_whitelist", "file,pipe", "-i", f"file:{path.absolute()}"]
    output = ["-map", "0:a:0", "-c:a", "pcm_f32be", "-f", "au", "pipe:1"]
    command = ["ffmpeg", "-nostdin", "-v", "error", "-xerror", *arguments, *output]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
        )
        stream = process.stdout
        assert stream is not None
        try:
            header = stream.read(_AU_HEADER.size)
            if len(header) == _AU_HEADER.size:
                magic, begin, _, encoding, rate, channels = _AU_HEADER.unpack(header)
                assert (magic, encoding) == (b".snd", _AU_FLOAT32)
                stream.read(begin - _AU_HEADER.size)
                yield _DecodedFile(stream, rate, channels)
            if not stream.read(1) and process.wait() != 0:
                raise ValueError(f"{path} cannot be read as audio: {_last_line(log, path)}")
        finally:
            process.kill()
            process.wait()
            stream.close()


def _last_line(log: IO[bytes], path: Path) -> str:
    log.seek(0)
    lines = log.read(10_000).decode(errors="replace").strip().splitlines()
    last = lines[-1] if lines else "ffmpeg failed without a message"
    return last.removeprefix(f"file:{path.absolute()}: ")[:300]


@contextmanager
def without_decoder_messages(enabled: bool = True) -> Iterator[None]:
    """Discards everything that is written to file descriptor 2 inside the context.

    Python cannot catch what C decoders write there: libmpg123 prints warnings about damaged mp3
    files, in the middle of progress bars. The descriptor belongs to the whole process, so use
    this around a decoder call only. Threads may be inside at the same time. Log lines are not
    lost: `start_logging` writes them through a descriptor of its own.
    """
    if not enabled:
        yield
        return
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _inside, _kept
    with _lock:
        _inside += 1
        if _inside > 1:
            return
        try:
            _kept = os.dup(2)
        except OSError:  # standard error is closed
            _kept = -1
            return
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 2)
        os.close(nothing)


def _leave() -> None:
    global _inside, _kept
    with _lock:
        _inside -= 1
        if _inside == 0 and _kept >= 0:
            os.dup2(_kept, 2)
            os.close(_kept)
            _kept = -1
