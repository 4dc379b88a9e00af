"""Finds out whether an audio file ends before its header says, which libsndfile does not report.

Such a file is left by a download, copy or recording that was interrupted.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import IO

from pruned_rnnt.data.audio.wav import is_wav, read_wav_header

# Programs that write a wav file to a pipe do not know its size, and leave the largest number or 0.
_UNKNOWN_BYTES = 2**31 - 2**16
_NIST_FIELD = re.compile(rb"(\w+) -(?:i|s\d+) (\S+)")
_NIST_CODINGS = (b"pcm", b"ulaw", b"mu-law", b"alaw")
# The header ends with the number of segments of the page; a byte follows with the size of each.
_OGG_PAGE, _OGG_HEADER = b"OggS", 27
_MOST_PAGE_BYTES = 65_307
_SPH_HEADER = 1024


def describe_truncation(path: Path | str) -> str:
    """How a wav, sph or ogg file ends too early, such as "it has 500 of 900 bytes of samples".

    Empty if it does not, for other formats, and for headers without a size.

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
        elif start[:7] == b"NIST_1A":
            begin, stated = _SPH_HEADER, _nist_bytes(start)
        elif start[:4] == _OGG_PAGE:
            return "it ends within a page" if _ends_within_a_page(file, size) else ""
        else:
            return ""
    found = size - begin
    if stated <= found or stated >= _UNKNOWN_BYTES:
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


def _ends_within_a_page(file: IO[bytes], size: int) -> bool:
    """A recorder that was stopped may leave out the last page; an incomplete one was cut off."""
    file.seek(max(0, size - _MOST_PAGE_BYTES))
    end = file.read()
    page = end[max(0, end.rfind(_OGG_PAGE)) :]
    if len(page) < _OGG_HEADER:
        return True
    segments = page[_OGG_HEADER - 1]
    return len(page) < _OGG_HEADER + segments + sum(page[_OGG_HEADER : _OGG_HEADER + segments])
