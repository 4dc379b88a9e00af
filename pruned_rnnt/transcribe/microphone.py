"""Samples from a microphone, read with the optional package sounddevice."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.system.optional_packages import require

logger = logging.getLogger(__name__)

_BYTES_PER_SAMPLE = 2


@contextmanager
def microphone() -> Iterator[Microphone]:
    """Open the default input device: one channel of 16-bit samples at 16 kHz.

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
            yield Microphone(stream)
    except sounddevice.PortAudioError as error:
        raise OSError(f"cannot open the microphone: {error}") from error


class Microphone:
    """A source of raw samples that ends when the user presses Ctrl-C."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._has_warned = False

    def read(self, size: int) -> bytes:
        """`size` bytes; no bytes after Ctrl-C."""
        try:
            data, overflowed = self._stream.read(size // _BYTES_PER_SAMPLE)
        except KeyboardInterrupt:
            return b""
        if overflowed and not self._has_warned:
            logger.warning("samples were lost: this machine is too slow to transcribe in real time")
            self._has_warned = True
        return bytes(data)
