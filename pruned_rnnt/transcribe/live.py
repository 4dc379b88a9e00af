"""Live transcription: samples in, text out, while the audio is still arriving.

Axes: S samples, T feature frames, F mel bins, N = 1 stream, C encoder frames of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from pruned_rnnt.data.audio.audio_stream import FeatureStream
from pruned_rnnt.data.audio.features import FEATURE_DIM, SAMPLING_RATE
from pruned_rnnt.data.audio.waveform import FloatArray
from pruned_rnnt.data.tokens.tokenizer import UNKNOWN_ID, Tokenizer
from pruned_rnnt.decode.search.streaming_greedy import StreamingGreedySearch
from pruned_rnnt.export.stream_sizes import stream_sizes
from pruned_rnnt.model.linear import transpose_in_memory
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.transcribe.silence import is_digital_silence

# After this many encoder frames (one second) without a symbol, the next word starts a new line.
_PAUSE_FRAMES = 25
# Feature frames of digital silence kept before the first sound: 0.2 s.
_SILENT_FRAMES = 20


class RawSource(Protocol):
    """A binary file, or an object with the same `read`."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; no bytes at the end of the source."""


class LiveRecogniser:
    """Transcribes one stream of audio with a causal model.

    Args:
        chunk, left: encoder frames of a chunk, and of its left context; 0 for the values that the
            model was trained with.

    Raises:
        ValueError: the model cannot stream.
    """

    def __init__(
        self, model: SpeechModel, tokenizer: Tokenizer, chunk: int = 0, left: int = 0
    ) -> None:
        silent = [UNKNOWN_ID] if model.vocab_size > UNKNOWN_ID else []
        chunk, left = stream_sizes(model, chunk, left)
        transpose_in_memory(model.encoder)
        self.stream = StreamingGreedySearch(model.eval(), chunk, left, silent)
        self.tokenizer = tokenizer
        self._device = next(model.parameters()).device
        self._state = self.stream.start(1)
        self._frames = FeatureStream()
        self._pending_TF = torch.zeros(0, FEATURE_DIM)
        self._started = False
        self._line: list[int] = []
        self._shown = ""
        self._pause = 0

    def accept(self, samples_S: FloatArray) -> str:
        """Transcribe more (S,) samples at 16 kHz; returns new text, with line breaks at pauses."""
        self._queue(self._frames.accept(samples_S))
        added = ""
        while len(self._pending_TF) >= self.stream.encoder.input_frames:
            added += self._transcribe_chunk()
        return added

    def finish(self) -> str:
        """End the stream: transcribe the samples left over, which do not fill a chunk."""
        self._queue(self._frames.finish())
        added = ""
        while len(self._pending_TF) > 0:
            added += self._transcribe_chunk()
        return added

    def _queue(self, features_TF: Tensor) -> None:
        """Append (T, F) features to those that wait for a full chunk.

        Digital silence at the beginning of the stream is dropped: training data always has some
        noise, and some models emit words for silence without any.
        """
        if not self._started:
            sounds = (~is_digital_silence(features_TF)).nonzero()[:, 0]
            if not len(sounds):
                return
            self._started = True
            features_TF = features_TF[max(0, int(sounds[0]) - _SILENT_FRAMES) :]
        self._pending_TF = torch.cat((self._pending_TF, features_TF))

    def _transcribe_chunk(self) -> str:
        """Transcribe the next chunk, which may be partly filled at the end of the stream."""
        encoder = self.stream.encoder
        chunk_TF = self._pending_TF[: encoder.input_frames]
        self._pending_TF = self._pending_TF[encoder.shift :]
        lengths_N = torch.tensor([len(chunk_TF)], device=self._device)
        missing = encoder.input_frames - len(chunk_TF)
        chunk_NTF = nn.functional.pad(chunk_TF, (0, 0, 0, missing))[None].to(self._device)
        symbols_NCM, self._state = self.stream(chunk_NTF, self._state, lengths_N)
        return self._show(symbols_NCM[0].tolist())

    def _show(self, frames: list[list[int]]) -> str:
        added = ""
        for frame in frames:
            symbols = [symbol for symbol in frame if symbol >= 0]
            self._pause = 0 if symbols else self._pause + 1
            if symbols:
                self._line += symbols
                text = self.tokenizer.decode(self._line)
                added += text[len(self._shown) :]
                self._shown = text
            elif self._pause == _PAUSE_FRAMES and self._line:
                added += "\n"
                self._line, self._shown = [], ""
        return added


def transcribe_raw(recogniser: LiveRecogniser, source: RawSource) -> Iterator[str]:
    """Yield the text of raw samples: signed 16 bits, native byte order, one channel, 16 kHz."""
    rest = b""
    while block := source.read(2 * SAMPLING_RATE // 10):
        data = rest + block
        even = len(data) // 2 * 2
        data, rest = data[:even], data[even:]
        integers_S = np.frombuffer(data, dtype=np.int16)
        yield recogniser.accept((integers_S / 32768).astype(np.float32))
    yield recogniser.finish()
