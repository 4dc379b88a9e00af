"""Live transcription: raw samples from standard input or a microphone in, and text out while the
audio is still arriving.

Samples are signed 16 bits, one channel, 16 kHz. Standard input may have a wav header before them
(arecord writes one) with any rate and several channels. Other formats raise an error that names
them.

Axes: S samples, C channels.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from pruned_rnnt.data.audio.audio_file import rate_problem
from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.data.audio.file_headers import (
    PCM,
    UNKNOWN_BYTES,
    WavHeader,
    is_wav,
    read_wav_header,
)
from pruned_rnnt.data.audio.samples import MOST_CHANNELS
from pruned_rnnt.system.optional_packages import require
from pruned_rnnt.transcribe.lost_speech import Mark
from pruned_rnnt.transcribe.stream import Stream
from pruned_rnnt.transcribe.stream_group import step

logger = logging.getLogger(__name__)

_SIGNATURES = {
    b"fLaC": "flac", b"OggS": "ogg or opus", b"ID3": "mp3", b"FORM": "aiff", b"caff": "caf",
    b".snd": "au", b"NIST_1A": "sph", b"RF64": "rf64", b"riff": "wave64", b"ADIF": "aac",
    b"\x1aE\xdf\xa3": "webm or matroska", b"\x30\x26\xb2\x75": "wma", b"#!AMR": "amr",
}  # fmt: skip
# Encoders of mp3 and aac name themselves within the first frame.
_ENCODERS = (b"Xing", b"Info", b"LAME", b"Lavc")
_PEEK_BYTES = 2048
_ADVICE = (
    "- reads 16-bit samples, of one channel at 16,000 Hz unless a wav header says otherwise: "
    "pass a file name instead, or convert with `ffmpeg -i pipe: -f s16le -ac 1 -ar 16000 pipe:`"
)
# Sound as floats is between these, and integers of 16 bits never are for so many in a row.
_LEAST_FLOAT, _MOST_FLOAT, _LEAST_FLOATS = 1e-12, 1.0, 64
_BYTES_PER_SAMPLE = 2
# What a pipe holds.
_PIPE_BYTES = 2**16
# While waiting for standard input, how often to check for Ctrl-C, in seconds.
_PATIENCE = 0.2


class RawSource(Protocol):
    """A binary file, or an object with the same `read`."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; no bytes at the end of the source."""


class RawLayout(NamedTuple):
    """Samples of so many channels, one after the other, at a rate in Hz."""

    rate: int = SAMPLING_RATE
    channels: int = 1


def transcribe_raw(
    stream: Stream,
    source: RawSource,
    on_mark: Callable[[Mark], object],
    layout: RawLayout | None = None,
) -> Iterator[str]:
    """Yield the text of raw samples: signed 16 bits in native byte order.

    Text is yielded as soon as it cannot change; a line ends at an endpoint.

    Args:
        on_mark: called with each mark of a text after the text has been yielded.
        layout: None for one channel at 16 kHz.
    """
    rest = b""
    shown = _Shown()
    rate, channels = layout or RawLayout()
    size = 2 * channels
    while block := source.read(size * (rate // 10)):
        data = rest + block
        whole = len(data) // size * size
        data, rest = data[:whole], data[whole:]
        samples_SC = np.frombuffer(data, dtype=np.int16).reshape(-1, channels)
        stream.accept_waveform(samples_SC, rate)
        yield from _decoded(stream, shown, on_mark)
    stream.finish()
    yield from _decoded(stream, shown, on_mark)


class _Shown:
    """The text of the current line."""

    def __init__(self) -> None:
        self._line = ""

    def up_to(self, text: str) -> str:
        """What is missing until the line is this text, which may be shorter."""
        added = text[len(self._line) :]
        self._line += added
        return added

    def end(self, text: str) -> str:
        """What is missing for a final text, and a line break if nothing after it was shown."""
        added = self.up_to(text)
        self._line = self._line[len(text) :].lstrip()
        return added + "\n" if text and not self._line else added


def _decoded(stream: Stream, shown: _Shown, on_mark: Callable[[Mark], object]) -> Iterator[str]:
    while step([stream]):
        for final in stream.take_finals():
            yield shown.end(final.text)
            for mark in final.marks:
                on_mark(mark)
        yield shown.up_to(stream.partial.stable)


class SampleSource:
    """A source with lookahead, which can be ended after a number of bytes.

    Attributes:
        layout: of its samples.
    """

    layout = RawLayout()

    def __init__(self, source: RawSource) -> None:
        self._source = source
        self._peeked = b""
        self._limit: int | None = None
        self._is_stopped = False

    def read(self, size: int, /) -> bytes:
        if self._limit is not None:
            size = min(size, self._limit)
        data, self._peeked = self._peeked[:size], self._peeked[size:]
        if not data and size:
            data = self._source.read(size)
        if self._limit is not None:
            self._limit -= len(data)
            if not data and self._limit > 0 and not self._is_stopped:
                logger.warning("standard input ended before its wav header says")
        return data

    def peek(self, size: int) -> bytes:
        """The next `size` bytes, which stay in the source; fewer at its end."""
        while len(self._peeked) < size and (data := self._source.read(size - len(self._peeked))):
            self._peeked += data
        return self._peeked[:size]

    def read_all(self, size: int) -> bytes:
        """Read `size` bytes; fewer at the end of the source."""
        data = self.peek(size)
        self._peeked = self._peeked[size:]
        return data

    def end_after(self, size: int) -> None:
        self._limit = size

    def stop(self) -> None:
        """Expect the end before a wav header says."""
        self._is_stopped = True


@contextmanager
def standard_input() -> Iterator[SampleSource]:
    """The samples of standard input; Ctrl-C ends them after those that were already sent.

    The programs of a pipe get Ctrl-C together. A second one interrupts.

    Raises:
        ValueError: as `open_samples`.
    """
    source = _Pipe(sys.stdin.fileno())
    samples = open_samples(source)

    def stop() -> None:
        source.stop()
        samples.stop()

    with _ctrl_c(stop):
        yield samples


class _Pipe:
    """The bytes of a descriptor; after `stop`, at most as many more as a pipe holds."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._left: int | None = None

    def stop(self) -> None:
        self._left = _PIPE_BYTES

    def read(self, size: int, /) -> bytes:
        # Its writer may stay silent after Ctrl-C.
        while not select.select([self._descriptor], [], [], _PATIENCE)[0]:
            if self._left is not None:
                return b""
        if self._left is None:
            return os.read(self._descriptor, size)
        data = os.read(self._descriptor, min(size, self._left))
        self._left -= len(data)
        return data


def open_samples(source: RawSource) -> SampleSource:
    """The raw samples of standard input, without a wav header.

    Raises:
        ValueError: the input is empty, in a format other than raw samples or wav, or a wav file of
            another width, or of a rate or number of channels that streams do not take.
    """
    samples = SampleSource(source)
    begin = samples.peek(_PEEK_BYTES)
    if is_wav(begin):
        _skip_wav_header(samples)
    elif kind := _encoded_format(begin) or ("32-bit floats" if _are_floats(begin) else ""):
        raise ValueError(f"standard input is {kind}; {_ADVICE}")
    if len(samples.peek(2)) < 2:
        raise ValueError("standard input has no samples")
    return samples


def _encoded_format(begin: bytes) -> str:
    """The name of the audio format of data that starts with `begin`; empty for raw samples."""
    for signature, name in _SIGNATURES.items():
        if begin.startswith(signature):
            return name
    if begin[4:8] == b"ftyp":
        return "m4a or mp4"
    if begin[:1] == b"\xff" and any(name in begin for name in _ENCODERS):
        return "mp3 or aac"
    return ""


def _are_floats(begin: bytes) -> bool:
    """Whether raw samples are floats, which would be transcribed as loud noise."""
    floats_S = np.frombuffer(begin[: len(begin) // 4 * 4], dtype=np.float32)
    sizes_S = np.abs(floats_S[floats_S != 0])
    is_sound_S = (sizes_S > _LEAST_FLOAT) & (sizes_S <= _MOST_FLOAT)
    return len(sizes_S) >= _LEAST_FLOATS and bool(is_sound_S.all())


def _skip_wav_header(samples: SampleSource) -> None:
    header = read_wav_header(samples.read_all)
    if header is None or not header.coding:
        raise ValueError(f"standard input is a broken wav file; {_ADVICE}")
    if (problem := _problem(header)) is not None:
        what = "PCM" if header.coding == PCM else f"format {header.coding}"
        raise ValueError(
            f"standard input is wav, {what}: {header.channels} channels of {header.bits} bits at "
            f"{header.rate:,} Hz{problem}; {_ADVICE}"
        )
    samples.layout = RawLayout(header.rate, header.channels)
    if 0 < header.size < UNKNOWN_BYTES:
        samples.end_after(header.size)


def _problem(header: WavHeader) -> str | None:
    """Why streams do not take these samples, to be appended to what they are; None if they do."""
    if (header.coding, header.bits) != (PCM, 16):
        return ""
    if not 1 <= header.channels <= MOST_CHANNELS:
        return f", needs 1 to {MOST_CHANNELS} channels"
    if problem := rate_problem(header.rate):
        return f" ({problem})"
    return None


@contextmanager
def microphone() -> Iterator[Microphone]:
    """Open the default input device: one channel of 16-bit samples at 16 kHz, until Ctrl-C.

    Ctrl-C at any time, also while a chunk is decoded, ends the source; a second one interrupts.
    Only the main thread can take Ctrl-C: in another one, call the source's `stop`.

    Raises:
        MissingPackageError: sounddevice is not installed.
        OSError: PortAudio is not installed, or the microphone cannot be opened.
    """
    require("sounddevice")
    try:
        import sounddevice
    except OSError as error:
        raise OSError(
            f"sounddevice cannot find PortAudio ({error}): install it; on Debian and Ubuntu, run "
            "apt-get install libportaudio2"
        ) from error
    try:
        with sounddevice.RawInputStream(SAMPLING_RATE, channels=1, dtype="int16") as stream:
            source = Microphone(stream)
            with _ctrl_c(source.stop):
                yield source
    except sounddevice.PortAudioError as error:
        raise OSError(f"cannot open the microphone: {error}") from error


@contextmanager
def _ctrl_c(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` when the user presses Ctrl-C the first time."""

    def first(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop()

    # None: a handler that Python cannot set again. Shells let background jobs ignore Ctrl-C.
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or before in (None, signal.SIG_IGN):
        yield
        return
    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Microphone:
    """A source of raw samples that ends after `stop`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._has_warned = False
        self._is_stopped = False

    def stop(self) -> None:
        """End the source."""
        self._is_stopped = True

    def read(self, size: int) -> bytes:
        """`size` bytes; no bytes once the source has ended."""
        if self._is_stopped:
            return b""
        data, overflowed = self._stream.read(size // _BYTES_PER_SAMPLE)
        if overflowed and not self._has_warned:
            logger.warning("samples were lost: this machine is too slow to transcribe in real time")
            self._has_warned = True
        return bytes(data)
