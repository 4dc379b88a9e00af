"""Recognition while the audio is still coming: samples in, text out.

Axes: S samples, T feature frames, F mel bins, N = 1 stream, C encoder frames of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from pruned_rnnt.data.audio import FloatArray, audio_features
from pruned_rnnt.data.features import FEATURE_DIM, SAMPLING_RATE
from pruned_rnnt.data.tokens import UNKNOWN_ID, Tokenizer
from pruned_rnnt.decode.streaming import StreamingTransducer
from pruned_rnnt.export.stream_sizes import stream_sizes, tail_seconds
from pruned_rnnt.model.transducer import TransducerModel

_SHIFT = SAMPLING_RATE // 100
# A frame of 25 ms lies around the middle of its 10 ms: it ends so many samples after its start.
_REACH = _SHIFT // 2 + SAMPLING_RATE // 80
# Encoder frames without a symbol, one second, after which the next word starts a new line.
_PAUSE_FRAMES = 25


class FeatureStream:
    """Samples of a stream to feature frames, the same as of the whole audio at once."""

    def __init__(self) -> None:
        self._samples_S = np.zeros(0, dtype=np.float32)
        self._first_frame = 0  # the frame at which the kept samples begin
        self._done = 0  # frames given out

    def accept(self, samples_S: FloatArray) -> Tensor:
        """(S,) float32 at 16 kHz -> the (T, F) frames which are complete now, perhaps none."""
        self._samples_S = np.concatenate((self._samples_S, samples_S))
        kept = len(self._samples_S)
        complete = self._first_frame + max(0, (kept - _REACH) // _SHIFT + 1)
        if complete <= self._done:
            return torch.zeros(0, FEATURE_DIM)
        features_TF = audio_features(self._samples_S)
        new_TF = features_TF[self._done - self._first_frame : complete - self._first_frame]
        # One frame more than needed stays, so that no later frame is at an edge.
        drop = max(0, complete - 1 - self._first_frame)
        self._samples_S = self._samples_S[drop * _SHIFT :]
        self._first_frame += drop
        self._done = complete
        return new_TF


class LiveRecogniser:
    """One stream of audio through a causal model.

    Args:
        chunk, left: encoder frames of a chunk and before it; 0 takes what the model was trained
            with.

    Raises:
        ValueError: the model cannot stream.
    """

    def __init__(
        self, model: TransducerModel, tokenizer: Tokenizer, chunk: int = 0, left: int = 0
    ) -> None:
        silent = [UNKNOWN_ID] if model.vocab_size > UNKNOWN_ID else []
        chunk, left = stream_sizes(model, chunk, left)
        self.stream = StreamingTransducer(model.eval(), chunk, left, silent)
        self.tokenizer = tokenizer
        self._state = self.stream.start(1)
        self._frames = FeatureStream()
        self._waiting_TF = torch.zeros(0, FEATURE_DIM)
        self._line: list[int] = []
        self._shown = ""
        self._pause = 0

    def accept(self, samples_S: FloatArray) -> str:
        """Take (S,) samples at 16 kHz; the text they add, a line break after each long pause."""
        self._waiting_TF = torch.cat((self._waiting_TF, self._frames.accept(samples_S)))
        encoder, added = self.stream.encoder, ""
        while len(self._waiting_TF) >= encoder.input_frames:
            chunk_NTF = self._waiting_TF[None, : encoder.input_frames]
            self._waiting_TF = self._waiting_TF[encoder.shift :]
            symbols_NC, self._state = self.stream(chunk_NTF, self._state)
            added += self._show(symbols_NC[0].tolist())
        return added

    def finish(self) -> str:
        """The text of what was not yet a full chunk."""
        silence = np.zeros(int(tail_seconds(self.stream.encoder) * SAMPLING_RATE), np.float32)
        return self.accept(silence)

    def _show(self, symbols: list[int]) -> str:
        added = ""
        for symbol in symbols:
            self._pause = 0 if symbol >= 0 else self._pause + 1
            if symbol >= 0:
                self._line.append(symbol)
                text = self.tokenizer.decode(self._line)
                added += text[len(self._shown) :]
                self._shown = text
            elif self._pause == _PAUSE_FRAMES and self._line:
                added += "\n"
                self._line, self._shown = [], ""
        return added


def transcribe_raw(recogniser: LiveRecogniser, source: BinaryIO) -> Iterator[str]:
    """Text as it comes, of raw signed 16-bit samples: one channel, 16 kHz, native byte order."""
    rest = b""
    while block := source.read(2 * SAMPLING_RATE // 10):
        data = rest + block
        even = len(data) // 2 * 2
        data, rest = data[:even], data[even:]
        integers_S = np.frombuffer(data, dtype=np.int16)
        yield recogniser.accept((integers_S / 32768).astype(np.float32))
    yield recogniser.finish()
