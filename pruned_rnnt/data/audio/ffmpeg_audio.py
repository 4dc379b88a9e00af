"""Decodes audio that libsndfile cannot read with the program ffmpeg, block by block.

Axes: S samples, C channels.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from pruned_rnnt.data.audio.waveform import FloatArray

# Header of Sun's AU format: magic, offset of the samples, their size, encoding, rate, channels.
_HEADER = struct.Struct(">4s5I")
_FLOAT32 = 6


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
def open_with_ffmpeg(path: Path) -> Iterator[_DecodedFile]:
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
            header = stream.read(_HEADER.size)
            if len(header) == _HEADER.size:
                magic, begin, _, encoding, rate, channels = _HEADER.unpack(header)
                assert (magic, encoding) == (b".snd", _FLOAT32)
                stream.read(begin - _HEADER.size)
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
