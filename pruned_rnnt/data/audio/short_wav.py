"""Reads short wav files of 16-bit integers in a few calls of the system.

libsndfile reads all formats, but its Python package holds Python's lock for most of the time that a
short file takes, and the threads that read and the one that launches kernels wait for each other.

Axes: S samples.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np

from pruned_rnnt.data.audio.waveform import Pcm16Array

# The samples of common files begin after 44 bytes, or some more with tags.
_HEADER_BYTES = 4096
_PCM = 1
_FORMAT = struct.Struct("<HHIIHH")
_CHUNK = struct.Struct("<4sI")


def short_wav(path: Path | str, rate: int, most: int) -> Pcm16Array | None:
    """The (S,) samples of an intact wav file with one channel of 16-bit integers at `rate` in Hz.

    None for all other files, those without samples, and those with more than `most`.
    """
    if sys.byteorder != "little":
        return None
    try:
        with Path(path).open("rb", buffering=0) as file:
            begin, size = _samples(file.read(_HEADER_BYTES), rate)
            if not 0 < size <= 2 * most or size % 2:
                return None
            samples_S: Pcm16Array = np.empty(size // 2, dtype=np.int16)
            file.seek(begin)
            return samples_S if file.readinto(samples_S.data) == size else None
    except OSError:
        return None


def _samples(header: bytes, rate: int) -> tuple[int, int]:
    """The first byte of the samples, and their bytes; 0 bytes for a file of another kind."""
    if header[:4] != b"RIFF" or header[8:12] != b"WAVE":
        return 0, 0
    place, is_wanted = 12, False
    while place + _CHUNK.size <= len(header):
        name, size = _CHUNK.unpack_from(header, place)
        place += _CHUNK.size
        if name == b"data":
            return place, size if is_wanted else 0
        if name == b"fmt " and place + _FORMAT.size <= len(header):
            kind, channels, of_file, _, _, bits = _FORMAT.unpack_from(header, place)
            is_wanted = (kind, channels, of_file, bits) == (_PCM, 1, rate, 16)
        place += size + size % 2
    return 0, 0
