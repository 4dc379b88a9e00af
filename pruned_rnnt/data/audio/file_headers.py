"""Reads the headers of audio files, where libsndfile says too little or is too slow.

It does not report that a file ends before its header says, as one does that an interrupted
download, copy or recording left. And its Python package holds Python's lock for most of the time
that a short file takes, while the threads that read and the one that launches kernels wait for each
other: short wav files of 16-bit integers are read here.

Axes: S samples.
"""

from __future__ import annotations

import io
import math
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Literal, NamedTuple

import numpy as np

from pruned_rnnt.data.audio.waveform import Pcm16Array

PCM = 1
_EXTENSIBLE = 0xFFFE
# The samples of common files begin after 44 bytes, or some more with tags.
_HEADER_BYTES = 4096
# Chunks before the samples are smaller than this.
_LARGEST_CHUNK = 2**24
_FORMAT = struct.Struct("<HHIIHH")
_CHUNK = struct.Struct("<4sI")
# Programs that write a wav file to a pipe do not know its size, and leave the largest number, some
# less the header, or 0. The sizes of rf64 and w64 files have 64 bits, others 32.
UNKNOWN_BYTES = 2**31 - 2**24
_UNKNOWN_SIZES = range(UNKNOWN_BYTES, 2**32 + 2**16)
_LARGEST_SIZE = 2**62
_NIST_FIELD = re.compile(rb"(\w+) -(?:i|s\d+) (\S+)")
_NIST_CODINGS = (b"pcm", b"ulaw", b"mu-law", b"alaw")
# By the first bytes of a file: the byte order of the fields whose sum is its size, the bytes that
# they do not count, and their places.
_SIZES: dict[bytes, tuple[Literal["big", "little"], int, tuple[slice, ...]]] = {
    b"FORM": ("big", 8, (slice(4, 8),)),  # aiff
    b".snd": ("big", 0, (slice(4, 8), slice(8, 12))),  # au
    b"RF64": ("little", 8, (slice(20, 28),)),
    b"riff": ("little", 0, (slice(16, 24),)),  # w64
    b"Crea": ("little", 4, (slice(20, 22), slice(27, 30))),  # voc, its first block
}
# Some writers count padding of the last chunk that they do not write.
_MOST_FILLING = 7
# The header ends with the number of segments of the page; a byte follows with the size of each.
_OGG_PAGE, _OGG_HEADER = b"OggS", 27
# Whether the page is the first one of its stream, and the stream's number.
_OGG_FIRST, _OGG_STREAM = 5, slice(14, 18)
_MOST_PAGE_BYTES = 65_307
_SPH_HEADER = 1024


class WavHeader(NamedTuple):
    """What the header of a wav file says.

    begin: first byte of the samples. size: number of their bytes; programs that write to a pipe do
        not know it, and write 0 or the largest number.
    coding: code of the sample format; 0, as all other fields, if the file has no format chunk.
    """

    begin: int
    size: int
    coding: int = 0
    channels: int = 0
    rate: int = 0
    bits: int = 0


def is_wav(start: bytes) -> bool:
    """Whether a file with these first 12 bytes is a wav file."""
    return start[:4] == b"RIFF" and start[8:12] == b"WAVE"


def read_wav_header(read: Callable[[int], bytes]) -> WavHeader | None:
    """Read up to the first sample; None for other files, and for those that end before it.

    Args:
        read: returns the next bytes, at most as many as its argument.
    """
    if not is_wav(read(12)):
        return None
    place, layout = 12, (0, 0, 0, 0)
    while len(head := read(_CHUNK.size)) == _CHUNK.size:
        name, size = _CHUNK.unpack(head)
        place += _CHUNK.size
        if name == b"data":
            return WavHeader(place, size, *layout)
        if size > _LARGEST_CHUNK:
            return None
        chunk = read(size + size % 2)
        place += len(chunk)
        if name == b"fmt " and len(chunk) >= _FORMAT.size:
            coding, channels, rate, _, _, bits = _FORMAT.unpack_from(chunk)
            if coding == _EXTENSIBLE and len(chunk) >= 26:
                (coding,) = struct.unpack_from("<H", chunk, 24)
            layout = (coding, channels, rate, bits)
    return None


def short_wav(path: Path | str, rate: int, most: int) -> Pcm16Array | None:
    """The (S,) samples of an intact wav file with one channel of 16-bit integers at `rate` in Hz.

    None for all other files, those without samples, and those with more than `most`.
    """
    if sys.byteorder != "little":
        return None
    try:
        with Path(path).open("rb", buffering=0) as file:
            header = read_wav_header(io.BytesIO(file.read(_HEADER_BYTES)).read)
            if header is None or header[2:] != (PCM, 1, rate, 16):
                return None
            if not 0 < header.size <= 2 * most or header.size % 2:
                return None
            samples_S: Pcm16Array = np.empty(header.size // 2, dtype=np.int16)
            file.seek(header.begin)
            return samples_S if file.readinto(samples_S.data) == header.size else None
    except OSError:
        return None


def describe_truncation(path: Path | str) -> str:
    """How a file ends too early, such as "it has 500 of 900 bytes of samples".

    For wav, sph, ogg, aiff, au, rf64, w64 and voc files; the decoders of flac and mp3 notice it.

    Also for what libsndfile does not read: wav files whose header says 0 bytes, and ogg files of
    several streams, one after the other. Empty if the file does not, for other formats, and for
    headers without a size.

    Raises:
        OSError: the file cannot be read.
    """
    with Path(path).open("rb") as file:
        start = file.read(_SPH_HEADER)
        size = file.seek(0, 2)
        if is_wav(start):
            file.seek(0)
            header = read_wav_header(file.read)
            begin, stated = header[:2] if header is not None else (0, 0)
            if header is not None and stated == 0 < size - begin:
                return (
                    "its header says 0 bytes of samples, as of a recorder that was stopped, and "
                    f"{size - begin:,} bytes follow; convert it with `ffmpeg -i`"
                )
        elif start[:7] == b"NIST_1A":
            begin, stated = _SPH_HEADER, _nist_bytes(start)
        elif start[:4] == _OGG_PAGE:
            return _describe_ogg(start, file, size)
        elif start[:4] in _SIZES:
            order, uncounted, fields = _SIZES[start[:4]]
            stated = uncounted + sum(int.from_bytes(start[field], order) for field in fields)
            is_short = size + _MOST_FILLING < stated < _LARGEST_SIZE
            is_known = stated not in _UNKNOWN_SIZES
            return f"it has {size:,} of {stated:,} bytes" if is_short and is_known else ""
        else:
            return ""
    found = size - begin
    if stated <= found or stated >= UNKNOWN_BYTES:
        return ""
    return f"it has {max(0, found):,} of {stated:,} bytes of samples"


def _nist_bytes(header: bytes) -> int:
    """The bytes of uncompressed samples; 0 if unknown."""
    fields = dict(_NIST_FIELD.findall(header))
    if fields.get(b"sample_coding", b"pcm") not in _NIST_CODINGS:
        return 0
    names = (b"sample_count", b"sample_n_bytes", b"channel_count")
    sizes = [fields.get(name, b"0") for name in names]
    return math.prod(map(int, sizes)) if all(size.isdigit() for size in sizes) else 0


def _describe_ogg(start: bytes, file: IO[bytes], size: int) -> str:
    """A recorder that was stopped may leave out the last page; an incomplete one was cut off."""
    file.seek(max(0, size - _MOST_PAGE_BYTES))
    end = file.read()
    page = end[max(0, end.rfind(_OGG_PAGE)) :]
    if len(page) < _OGG_HEADER or len(page) < _page_bytes(page):
        return "it ends within a page"
    # Several streams may begin at the start and run side by side, as sound and its description.
    streams = set()
    while start[:4] == _OGG_PAGE and len(start) >= _OGG_HEADER and start[_OGG_FIRST] & 2:
        streams.add(start[_OGG_STREAM])
        start = start[_page_bytes(start) :]
    if page[_OGG_STREAM] in streams:
        return ""
    return (
        "it has several streams, one after the other, of which the first is read; make one of them"
    )


def _page_bytes(page: bytes) -> int:
    segments = page[_OGG_HEADER - 1]
    return _OGG_HEADER + segments + sum(page[_OGG_HEADER : _OGG_HEADER + segments])
