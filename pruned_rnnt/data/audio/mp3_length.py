"""Gives mp3 files the length that libsndfile would otherwise estimate, or take for that of a part.

An mp3 file is a sequence of frames. Encoders write the number of frames into a first one without
sound, the Xing header, which files lack that were written to a pipe or cut from a stream. For these
libsndfile divides the size of the file by that of the first frame, and reads at most so many
samples. In a variable bit rate the frames of silence are small: of a recording that begins with
speech and goes on with pauses, the end would be missing. Of files that were joined, the header has
the number of the first one.
"""

from __future__ import annotations

import functools
import io
import mmap
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

# Versions in a frame's header; its sampling rate is one of three, divided by the version's number.
_MPEG_1 = 3
_DIVISORS = {_MPEG_1: 1, 2: 2, 0: 4}
_SAMPLING_RATES = (44_100, 48_000, 32_000)
# Kilobits a second of the indices 1 to 14 in the header of a frame of layer 3.
_OF_MPEG_1 = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_OF_OTHERS = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_HEADER = re.compile(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb][\x10-\xef].", re.DOTALL)
_MONO = 3
_ID3_HEADER = 10
# After the header and the side information of the first frame: flags, of which the last says that
# the number of frames follows, and the one before it that their bytes do.
_LENGTH = re.compile(rb"(?:Xing|Info)\0{3}([\1\3\5\7\x09\x0b\x0d\x0f])(.{4})(.{4})", re.DOTALL)
_LENGTH_END = 64
# Old kinds of tags have fewer bytes, and come after the last frame.
_TAGS_AT_END = 512


def with_mp3_length(source: Any) -> Any:
    """What libsndfile should open instead of `source`, the name of a file or a BytesIO.

    A BytesIO with a Xing header for an mp3 file of variable bit rate that has none, or with another
    length for one with more frames than its header says; else `source`. The estimate for files of
    one bit rate is right, or too long by their tags.
    """
    if isinstance(source, io.BytesIO):
        data = source.getvalue()
        start = _start(data)
        return source if start is None else io.BytesIO(start.replacement + data[start.size :])
    try:
        # Path.open would triple the time, which all files of other formats take too.
        with io.FileIO(source) as file:
            if not _may_be_mp3(file.read(_ID3_HEADER)):
                return source
            status = os.fstat(file.fileno())
            start = _start_of_file(source, status.st_size, status.st_mtime_ns)
            if start is None:
                return source
            file.seek(start.size)
            return io.BytesIO(start.replacement + file.read())
    except (OSError, TypeError, ValueError):  # libsndfile's error is the one to show
        return source


def mp3_states_its_length(path: Path) -> bool:
    """Whether the first frame of an mp3 file has the number of frames.

    libsndfile estimates the length of others, as those of Common Voice, from the size of the file
    with its tags.
    """
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        found = _HEADER.search(data, _after_tags(data))
        return found is not None and _length(data, found.start()) is not None


def _may_be_mp3(start: bytes) -> bool:
    return start[:3] == b"ID3" or (start[:1] == b"\xff" and start[1:2] >= b"\xe0")


def _after_tags(data: Any) -> int:
    place = 0
    while data[place : place + 3] == b"ID3":
        size = data[place + 6 : place + _ID3_HEADER]  # seven bits in each byte
        place += _ID3_HEADER + sum(value << 7 * (3 - i) for i, value in enumerate(size))
    return place


def _length(data: Any, begin: int) -> re.Match[bytes] | None:
    return _LENGTH.search(data, begin, begin + _LENGTH_END)


def _frames(length: re.Match[bytes]) -> int:
    return int.from_bytes(length[2], "big")


class _Start(NamedTuple):
    """What takes the place of the first `size` bytes of a file."""

    replacement: bytes
    size: int


# Finding it takes longer than decoding a segment, and a recording may have thousands of those.
@functools.lru_cache(maxsize=10_000)
def _start_of_file(path: Any, size: int, changed_ns: int) -> _Start | None:
    """`_start` of a file with this size and this time of its last change."""
    with (
        io.FileIO(path) as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        return _start(data)


def _start(data: Any) -> _Start | None:
    """A header with the number of frames; None for data that have one, or need none."""
    if not _may_be_mp3(data[:_ID3_HEADER]):
        return None
    found = _HEADER.search(data, _after_tags(data))
    if found is None or found[0][2] >> 2 & 3 == len(_SAMPLING_RATES):
        return None
    begin, header = found.start(), found[0]
    length = _length(data, begin)
    # To count the frames takes longer than to open a file.
    if length is not None and length[1][0] & 2:
        size = int.from_bytes(length[3], "big")
        if len(data) - begin <= size + _TAGS_AT_END:
            # libsndfile does not look behind what follows a tag.
            return None if begin == _after_tags(data) else _Start(b"", begin)
    frame = _frames_like(header[1] | 1, header[2] >> 2 & 3)
    first = frame.match(data, begin)
    # What looks like a header may be part of a tag or of another format.
    if first is None or frame.match(data, first.end()) is None:
        return None
    bit_rates = [data[each.start() + 2] >> 4 for each in frame.finditer(data, begin)]
    if length is None:
        if len(set(bit_rates)) == 1:
            return None
        return _Start(_xing_header(header, len(bit_rates)), begin)
    frames = len(bit_rates) - 1
    if frames <= _frames(length):
        # libsndfile reads little of a part of another rate: its length makes that a truncation.
        parts = _LENGTH.finditer(data, begin)
        frames = min(sum(_frames(part) + 1 for part in parts) - 1, 2**32 - 1)
    if frames <= _frames(length):
        return None
    # The rest stays: the header also says how much of the sound the encoder added at both ends.
    return _Start(data[begin : length.start(2)] + frames.to_bytes(4, "big"), length.end(2))


@functools.cache
def _frames_like(second: int, rate: int) -> re.Pattern[bytes]:
    """Finds the frames of a version, which is in the second byte, and an index of sampling rates.

    A frame begins with its bit rate, from which its length follows, and with two bits, of which
    one lengthens it by a byte and the other has no meaning. Another one or a tag follows it, which
    the picture in a tag does not imitate.
    """
    kinds = []
    for index in range(1, 15):
        for padding in (0, 1):
            third = index << 4 | rate << 2 | padding << 1
            rest = _frame_bytes(second, third) - 3
            kinds.append(rb"[\x%02x\x%02x].{%d}" % (third, third | 1, rest))
    # The last bit says that there is no checksum.
    start = rb"\xff[\x%02x\x%02x]" % (second & 0xFE, second | 1)
    end = rb"(?=\xff[\x%02x\x%02x]|ID3|TAG|APE|\Z)" % (second & 0xFE, second | 1)
    return re.compile(start + b"(?:" + b"|".join(kinds) + b")" + end, re.DOTALL)


def _frame_bytes(second: int, third: int) -> int:
    version = second >> 3 & 3
    bit_rates, factor = (_OF_MPEG_1, 144) if version == _MPEG_1 else (_OF_OTHERS, 72)
    sampling_rate = _SAMPLING_RATES[third >> 2 & 3] // _DIVISORS[version]
    return factor * 1000 * bit_rates[(third >> 4) - 1] // sampling_rate + (third >> 1 & 1)


def _xing_header(header: bytes, frames: int) -> bytes:
    """A frame of the highest bit rate, in which the number of frames has room, without a sound."""
    second, third = header[1] | 1, 14 << 4 | header[2] & 0b1100
    is_mono = header[3] >> 6 == _MONO
    if second >> 3 & 3 == _MPEG_1:
        side_information = 17 if is_mono else 32
    else:
        side_information = 9 if is_mono else 17
    # The flag says that the number of frames follows.
    length = b"Xing" + (1).to_bytes(4, "big") + frames.to_bytes(4, "big")
    frame = bytes([0xFF, second, third, header[3]]) + bytes(side_information) + length
    return frame.ljust(_frame_bytes(second, third), b"\0")
