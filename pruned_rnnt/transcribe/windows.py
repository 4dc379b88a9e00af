"""Encode audio of any length in windows, in constant memory.

Axes: T feature frames (10 ms), T' encoder frames, F mel bins, E encoder width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pruned_rnnt.decode.decode_config import Precision
from pruned_rnnt.decode.encode import encode_padded
from pruned_rnnt.decode.word_times import frame_seconds
from pruned_rnnt.model.speech_model import SpeechModel

# The energy at an encoder frame is the mean over this many frames around it: 0.3 s.
_QUIET_FRAMES = 7
_LONGEST_SECONDS = 30.0
_OVERLAP_SHARE = 2 / 15
# A pause is this much (13 dB) below the 90th percentile of the log-energies.
_PAUSE_DEPTH = 3.0
_LOUD_QUANTILE = 0.9
# Windows start at a multiple of this many frames unless the encoder has chunks, so that an encoder
# that downsamples inside combines the same frames in every window.
_ALIGNMENT = 16


class Window(NamedTuple):
    """The encoder output of one window of a stream.

    encoded_NTE: (1, T', E).
    is_start: True at the start of the stream and after a pause: the frames are encoded without
        left context.
    """

    encoded_NTE: Tensor
    is_start: bool


@dataclass
class _Buffer:
    """Features that the next windows need.

    skip: encoder frames at its start that were returned already and stay as left context.
    step: feature frames of an encoder frame.
    is_start: as in the next `Window`.
    """

    features_TF: Tensor
    step: int
    skip: int = 0
    is_start: bool = True

    @property
    def next_TF(self) -> Tensor:
        return self.features_TF[self.step * self.skip :]

    def drop(self, frames: int, context: int = 0, *, is_pause: bool) -> None:
        """Move past `frames` encoder frames; the last `context` of them stay as left context."""
        gone = self.skip + frames - context
        self.features_TF = self.features_TF[self.step * gone :]
        self.skip, self.is_start = context, is_pause


class WindowEncoder:
    """Encodes a stream of features window by window, without leaving out any of it.

    A window ends at the quietest frame between half and all of its length. If that is a pause, the
    next window starts like a new utterance. If not, both windows are encoded with `overlap` frames
    of context on that side, whose output is discarded, to approximate encoding them together.
    Audio of at most window + 2 overlap frames is one window.

    Args:
        window, overlap: in encoder frames; at least 1 and 0.
    """

    def __init__(self, model: SpeechModel, window: int, overlap: int) -> None:
        self.model = model
        self.window = window
        self.overlap = overlap
        self._receptive_field = model.encoder.receptive_field
        self._step = model.encoder.subsampling_factor
        config = model.encoder.config
        self._alignment = config.stream_sizes[0] if config.causal else _ALIGNMENT

    @classmethod
    def as_trained(cls, model: SpeechModel, p99_duration: float | None) -> WindowEncoder:
        """Windows as long as the training utterances, with an overlap of 2/15 of that.

        Args:
            p99_duration: 99th percentile of the training utterances' durations in seconds, of which
                at most 30 are used; None if unknown.
        """
        seconds = min(_LONGEST_SECONDS, p99_duration or _LONGEST_SECONDS)
        frame = frame_seconds(model.encoder)
        window = max(1, round(seconds / frame))
        return cls(model, window, round(seconds * _OVERLAP_SHARE / frame))

    def __call__(self, pieces: Iterable[Tensor]) -> Iterator[Window]:
        """Yield the windows of a stream whose features arrive in pieces (T, F).

        A stream with any features gives at least one frame.
        """
        buffer: _Buffer | None = None
        is_first = True
        needed = self.window + 2 * self.overlap
        for piece_TF in pieces:
            if buffer is None:
                buffer = _Buffer(piece_TF, self._step)
            else:
                buffer.features_TF = torch.cat((buffer.features_TF, piece_TF))
            while self._left(buffer) > needed:
                yield self._next(buffer)
                is_first = False
        if buffer is not None and is_first:
            yield Window(encode_features(self.model, buffer.features_TF), True)
        elif buffer is not None:
            while self._left(buffer) > 0:
                yield self._next(buffer)

    def _next(self, buffer: _Buffer) -> Window:
        """The next window; moves the buffer past it.

        If the buffer holds at most one window and its context, the window takes all of it.
        """
        length, is_pause = self._left(buffer), True
        if length > self.window + 2 * self.overlap:
            length, is_pause = self._quiet_end(buffer.next_TF)
        end = buffer.skip + length
        frames = end if is_pause else end + self.overlap
        last = self._step * (frames - 1) + self._receptive_field
        encoded_NTE = encode_features(self.model, buffer.features_TF[:last])
        window = Window(encoded_NTE[:, buffer.skip : end], buffer.is_start)
        context = (
            0 if is_pause else end - max(0, end - self.overlap) // self._alignment * self._alignment
        )
        buffer.drop(length, context, is_pause=is_pause)
        return window

    def _left(self, buffer: _Buffer) -> int:
        return self._frames(buffer.features_TF) - buffer.skip

    def _frames(self, features_TF: Tensor) -> int:
        return (len(features_TF) - self._receptive_field) // self._step + 1

    def _quiet_end(self, features_TF: Tensor) -> tuple[int, bool]:
        """Length of the next window, which ends at the quietest frame; True if that is a pause."""
        shortest = (self.window + 1) // 2
        energies_T = features_TF[: self._step * (self.window + 1)].mean(dim=1)
        around_T = nn.functional.avg_pool1d(
            energies_T[None, None],
            self._step * _QUIET_FRAMES,
            stride=self._step,
            padding=self._step * _QUIET_FRAMES // 2,
            count_include_pad=False,
        )[0, 0]
        quietest, place = around_T[shortest : self.window + 1].min(dim=0)
        is_pause = bool(quietest < energies_T.quantile(_LOUD_QUANTILE) - _PAUSE_DEPTH)
        return shortest + int(place), is_pause


def encode_features(
    model: SpeechModel, features_TF: Tensor, precision: Precision = "float32"
) -> Tensor:
    """Features (T, F) of one utterance -> encoder output (1, T', E), T' >= 1.

    Features shorter than the receptive field of a frame are padded with their last one.
    """
    missing = max(0, model.encoder.receptive_field - len(features_TF))
    features_NTF = features_TF[None]
    if missing:
        features_NTF = nn.functional.pad(features_NTF, (0, 0, 0, missing), "replicate")
    lengths = torch.tensor([features_NTF.size(1)])
    return encode_padded(model, features_NTF, lengths, precision)[0]
