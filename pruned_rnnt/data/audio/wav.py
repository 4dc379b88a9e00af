"""Reads the headers of wav files, and short files of 16-bit integers in a few calls of the system.

libsndfile reads all formats, but its Python package holds Python's lock for most of the time that a
short file takes, and the threads that read and the one that launches kernels wait for each other.

Axes: S samples.
"""

from __future__ import annotations

import io
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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
