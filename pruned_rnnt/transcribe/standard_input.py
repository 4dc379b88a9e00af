"""Raw samples from standard input.

Samples are signed 16 bits, one channel, 16 kHz. A wav header before such samples is skipped,
because many programs write one (arecord does). Any other format raises an error that names it.
"""

from __future__ import annotations

import struct

from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.transcribe.live import RawSource

_SIGNATURES = {
    b"fLaC": "flac", b"OggS": "ogg or opus", b"ID3": "mp3", b"FORM": "aiff", b"caff": "caf",
    b".snd": "au", b"NIST_1A": "sph", b"RF64": "rf64", b"riff": "wave64", b"ADIF": "aac",
    b"\x1aE\xdf\xa3": "webm or matroska", b"\x30\x26\xb2\x75": "wma", b"#!AMR": "amr",
}  # fmt: skip
# Bytes inspected: enough for one mp3 frame, of at most 1,441 bytes, and the next header.
_PEEK_BYTES = 2048
# kbit/s of MPEG 1 and of MPEG 2, layer III, by the index in the frame header.
_KBITS = (
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0),
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0),
)
_MP3_RATES = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}
_PCM, _EXTENSIBLE = 1, 0xFFFE
# Chunks before the samples of a wav file are much smaller than this.
_LARGEST_CHUNK = 2**20
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

    def take(self, size: int) -> bytes:
        """Read exactly `size` bytes; ValueError if the source has fewer."""
        data = self.peek(size)
        if len(data) < size:
            raise ValueError("standard input ends within its wav header")
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
    if begin.startswith(b"RIFF") and begin[8:12] == b"WAVE":
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
    # Raw samples may look like one frame header, but hardly like two at the right distance.
    for name, length_of in (("mp3", _mp3_frame_length), ("aac", _aac_frame_length)):
        length = length_of(begin)
        if length and length_of(begin[length:]):
            return name
    return ""


def _mp3_frame_length(data: bytes) -> int:
    """Size in bytes of the layer III frame at the start of `data`; 0 if there is none."""
    if len(data) < 4 or data[0] != 0xFF or data[1] & 0xE6 != 0xE2:
        return 0
    version, rate, kbits = data[1] >> 3 & 3, data[2] >> 2 & 3, data[2] >> 4
    if version not in _MP3_RATES or rate == 3:
        return 0
    bits = 1000 * _KBITS[version != 3][kbits]
    return (144 if version == 3 else 72) * bits // _MP3_RATES[version][rate] + (data[2] >> 1 & 1)


def _aac_frame_length(data: bytes) -> int:
    """Size in bytes of the ADTS frame at the start of `data`; 0 if there is none."""
    if len(data) < 7 or data[0] != 0xFF or data[1] & 0xF6 != 0xF0 or data[2] >> 2 & 15 > 12:
        return 0
    length = (data[3] & 3) << 11 | data[4] << 3 | data[5] >> 5
    return length if length > 7 else 0


def _skip_wav_header(samples: SampleSource) -> None:
    samples.take(12)
    is_usable = False
    while True:
        name, size = struct.unpack("<4sI", samples.take(8))
        if name == b"data":
            break
        if size > _LARGEST_CHUNK:
            raise ValueError(f"standard input is a broken wav file; {_ADVICE}")
        chunk = samples.take(size + size % 2)
        if name == b"fmt " and size >= 16:
            kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", chunk[:16])
            if kind == _EXTENSIBLE and size >= 26:
                (kind,) = struct.unpack("<H", chunk[24:26])
            is_usable = (kind, channels, rate, bits) == (_PCM, 1, SAMPLING_RATE, 16)
            if not is_usable:
                what = "PCM" if kind == _PCM else f"format {kind}"
                raise ValueError(
                    f"standard input is wav, {what}: {channels} channels of {bits} bits at "
                    f"{rate:,} Hz; {_ADVICE}"
                )
    if not is_usable:
        raise ValueError(f"standard input is a broken wav file; {_ADVICE}")
    # A program that writes to a pipe does not know the size and writes 0 or the largest value.
    if size:
        samples.end_after(size)
