"""Raw samples from standard input.

Samples are signed 16 bits, one channel, 16 kHz. A wav header before such samples is skipped,
because many programs write one (arecord does). Other formats raise an error that names them.
"""

from __future__ import annotations

from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.data.audio.wav import PCM, is_wav, read_wav_header
from pruned_rnnt.transcribe.live import RawSource

_SIGNATURES = {
    b"fLaC": "flac", b"OggS": "ogg or opus", b"ID3": "mp3", b"FORM": "aiff", b"caff": "caf",
    b".snd": "au", b"NIST_1A": "sph", b"RF64": "rf64", b"riff": "wave64", b"ADIF": "aac",
    b"\x1aE\xdf\xa3": "webm or matroska", b"\x30\x26\xb2\x75": "wma", b"#!AMR": "amr",
}  # fmt: skip
# Encoders of mp3 and aac name themselves within the first frame.
_ENCODERS = (b"Xing", b"Info", b"LAME", b"Lavc")
_PEEK_BYTES = 2048
_ADVICE = (
    "- reads one channel of 16-bit samples at 16,000 Hz: pass a file name instead, or convert "
    "the audio with `ffmpeg -i pipe: -f s16le -ac 1 -ar 16000 pipe:`"
)


class SampleSource:
    """A source with lookahead, which can be ended after a number of bytes."""

    def __init__(self, source: RawSource) -> None:
        self._source = source
        self._peeked = b""
        self._limit: int | None = None

    def read(self, size: int, /) -> bytes:
        if self._limit is not None:
            size = min(size, self._limit)
        data, self._peeked = self._peeked[:size], self._peeked[size:]
        if not data and size:
            data = self._source.read(size)
        if self._limit is not None:
            self._limit -= len(data)
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


def open_samples(source: RawSource) -> SampleSource:
    """The raw samples of standard input, without a wav header.

    Raises:
        ValueError: the input is empty, in a format other than raw samples or wav, or a wav file of
            another rate, width or number of channels.
    """
    samples = SampleSource(source)
    begin = samples.peek(_PEEK_BYTES)
    if not begin:
        raise ValueError("standard input has no samples")
    if is_wav(begin):
        _skip_wav_header(samples)
    elif kind := encoded_format(begin):
        raise ValueError(f"standard input is {kind}; {_ADVICE}")
    return samples


def encoded_format(begin: bytes) -> str:
    """The name of the audio format of data that starts with `begin`; empty for raw samples."""
    for signature, name in _SIGNATURES.items():
        if begin.startswith(signature):
            return name
    if begin[4:8] == b"ftyp":
        return "m4a or mp4"
    if begin[:1] == b"\xff" and any(name in begin for name in _ENCODERS):
        return "mp3 or aac"
    return ""


def _skip_wav_header(samples: SampleSource) -> None:
    header = read_wav_header(samples.read_all)
    if header is None or not header.coding:
        raise ValueError(f"standard input is a broken wav file; {_ADVICE}")
    if header[2:] != (PCM, 1, SAMPLING_RATE, 16):
        what = "PCM" if header.coding == PCM else f"format {header.coding}"
        raise ValueError(
            f"standard input is wav, {what}: {header.channels} channels of {header.bits} bits at "
            f"{header.rate:,} Hz; {_ADVICE}"
        )
    # A program that writes to a pipe does not know the size and writes 0 or the largest value.
    if header.size:
        samples.end_after(header.size)
