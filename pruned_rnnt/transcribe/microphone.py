"""Samples from a microphone, through the optional library sounddevice."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.optional_packages import require
from pruned_rnnt.usage_errors import ExportError

logger = logging.getLogger(__name__)

_BYTES = 2  # of a sample


@contextmanager
def microphone() -> Iterator[Microphone]:
    """The default input of this machine: one channel of 16 bits at 16 kHz.

    Raises:
        MissingPackageError: sounddevice is not installed.
        ExportError: there is no PortAudio for it, or no microphone.
    """
    require("sounddevice")
    try:
        import sounddevice
    except OSError as error:
        raise ExportError(
            f"sounddevice finds no PortAudio ({error}): install it, on Debian and Ubuntu with "
            "apt-get install libportaudio2"
        ) from error
    try:
        with sounddevice.RawInputStream(SAMPLING_RATE, channels=1, dtype="int16") as stream:
            yield Microphone(stream)
    except sounddevice.PortAudioError as error:
        raise ExportError(f"the microphone cannot be opened: {error}") from error


class Microphone:
    """Reads like a file of raw samples; ends when the user presses Ctrl-C."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._lost = False

    def read(self, size: int) -> bytes:
        """`size` bytes, none after Ctrl-C."""
        try:
            data, overflowed = self._stream.read(size // _BYTES)
        except KeyboardInterrupt:
            return b""
        if overflowed and not self._lost:
            logger.warning("samples were lost: recognition is slower than speech on this machine")
            self._lost = True
        return bytes(data)
