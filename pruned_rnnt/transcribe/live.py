"""Live transcription of raw samples: text out, while the audio is still arriving."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np

from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.transcribe.lost_speech import Mark
from pruned_rnnt.transcribe.stream import Stream
from pruned_rnnt.transcribe.stream_group import step


class RawSource(Protocol):
    """A binary file, or an object with the same `read`."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; no bytes at the end of the source."""


class RawLayout(NamedTuple):
    """Samples of so many channels, one after the other, at a rate in Hz."""

    rate: int = SAMPLING_RATE
    channels: int = 1


def transcribe_raw(
    stream: Stream,
    source: RawSource,
    on_mark: Callable[[Mark], object],
    layout: RawLayout | None = None,
) -> Iterator[str]:
    """Yield the text of raw samples: signed 16 bits in native byte order.

    Text is yielded as soon as it cannot change; a line ends at an endpoint.

    Args:
        on_mark: called with each mark of a text after the text has been yielded.
        layout: None for one channel at 16 kHz.
    """
    rest = b""
    shown = _Shown()
    rate, channels = layout or RawLayout()
    size = 2 * channels
    while block := source.read(size * (rate // 10)):
        data = rest + block
        whole = len(data) // size * size
        data, rest = data[:whole], data[whole:]
        samples_SC = np.frombuffer(data, dtype=np.int16).reshape(-1, channels)
        stream.accept_waveform(samples_SC, rate)
        yield from _decoded(stream, shown, on_mark)
    stream.finish()
    yield from _decoded(stream, shown, on_mark)


class _Shown:
    """The text of the current line."""

    def __init__(self) -> None:
        self._line = ""

    def up_to(self, text: str) -> str:
        """What is missing until the line is this text, which may be shorter."""
        added = text[len(self._line) :]
        self._line += added
        return added

    def end(self, text: str) -> str:
        """What is missing for a final text, and a line break if nothing after it was shown."""
        added = self.up_to(text)
        self._line = self._line[len(text) :].lstrip()
        return added + "\n" if text and not self._line else added


def _decoded(stream: Stream, shown: _Shown, on_mark: Callable[[Mark], object]) -> Iterator[str]:
    while step([stream]):
        for final in stream.take_finals():
            yield shown.end(final.text)
            for mark in final.marks:
                on_mark(mark)
        yield shown.up_to(stream.partial.stable)
