"""Audio of any length through the encoder, window by window, in constant memory.

Axes: T feature frames (10 ms), T' encoder frames (40 ms), F mel bins, E encoder width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pruned_rnnt.decode.decode_set import FRAME_SECONDS
from pruned_rnnt.model.subsampling import SUBSAMPLING_FACTOR
from pruned_rnnt.model.transducer_model import TransducerModel
from pruned_rnnt.transcribe.silence import SilenceFinder, frame_energies, is_digital_silence

# Encoder frames around a frame that tell how quiet it is there: 0.3 s.
_QUIET_FRAMES = 7
_LONGEST_SECONDS = 30.0
# A place is a pause where the mean log-energy is this much below that of loud speech: 13 dB.
_PAUSE_DEPTH = 3.0
_LOUD = 0.9
# Windows of encoders without chunks begin at a multiple of this, so that an encoder that halves its
# frames inside pairs the same ones in every window.
_UNIT = 16


class Window(NamedTuple):
    """encoded_NTE: (1, T', E), the frames that follow those of the window before.

    begin: the first of them in the stream; after silence that was left out they do not follow.
    is_start: speech starts anew here, after a pause or at the beginning: the frames are encoded
    without anything before them, and a search should start anew, too.
    """

    encoded_NTE: Tensor
    is_start: bool
    begin: int


@dataclass
class _Kept:
    """Features that windows still need: skip of their encoder frames were given out already.

    begin: encoder frames of the stream before those that come next.
    """

    features_TF: Tensor
    skip: int = 0
    begin: int = 0
    is_start: bool = True

    @property
    def coming_TF(self) -> Tensor:
        return self.features_TF[SUBSAMPLING_FACTOR * self.skip :]

    def drop(self, frames: int, context: int = 0, *, is_pause: bool) -> None:
        """Go on by so many encoder frames, of which the last `context` are kept."""
        gone = self.skip + frames - context
        self.features_TF = self.features_TF[SUBSAMPLING_FACTOR * gone :]
        self.skip, self.is_start = context, is_pause
        self.begin += frames


class WindowEncoder:
    """Encoder output of a stream of features, window by window.

    A window ends where it is quiet, between half its length and its whole. Where that is a pause,
    the next one begins like a new utterance. Where it is none, both are encoded with `overlap`
    frames of their surroundings, of which nothing is kept, as if they had been encoded at once.
    Audio that is no longer than window + 2 overlap is one window.

    Args:
        window, overlap: in encoder frames; at least 1 and 0.
        skip_silence: windows end in long silence, wherever it begins, and hold little of it; in
            audio of one window it stays, unless there is nothing but digital silence.
    """

    def __init__(
        self, model: TransducerModel, window: int, overlap: int, *, skip_silence: bool = False
    ) -> None:
        self.model = model
        self.skip_silence = skip_silence
        self.window = window
        self.overlap = overlap
        self._receptive_field = model.encoder.receptive_field
        config = model.encoder.config
        self._unit = config.stream_sizes[0] if config.causal else _UNIT

    @classmethod
    def as_trained(
        cls,
        model: TransducerModel,
        p99_duration: float | None,
        window_seconds: float | None = None,
        overlap_seconds: float | None = None,
        *,
        skip_silence: bool = False,
    ) -> WindowEncoder:
        """Windows as long as the utterances of training, or as `window_seconds` says.

        p99_duration: of these utterances in seconds; None where it is not known. At most 30 count.
        overlap_seconds: default: 2/15 of the window.
        """
        if window_seconds is None:
            window_seconds = min(_LONGEST_SECONDS, p99_duration or _LONGEST_SECONDS)
        if overlap_seconds is None:
            overlap_seconds = window_seconds * 2 / 15
        window = max(1, round(window_seconds / FRAME_SECONDS))
        overlap = max(0, round(overlap_seconds / FRAME_SECONDS))
        return cls(model, window, overlap, skip_silence=skip_silence)

    def __call__(self, pieces: Iterable[Tensor]) -> Iterator[Window]:
        """The windows of a stream's features, which come in pieces (T, F).

        At least one frame comes out, whatever goes in, but for silence that is left out.
        """
        kept: _Kept | None = None
        finder = SilenceFinder() if self.skip_silence else None
        need = self.window + 2 * self.overlap
        for piece_TF in pieces:
            if kept is None:
                kept = _Kept(piece_TF)
            else:
                kept.features_TF = torch.cat((kept.features_TF, piece_TF))
            while self._left(kept) > need:
                yield from self._next(kept, finder)
        if kept is not None and kept.begin == 0:
            if finder is None or not is_digital_silence(kept.features_TF).all():
                yield self._only_window(kept.features_TF)
        elif kept is not None:
            while self._left(kept) > 0:
                yield from self._next(kept, finder)

    def _next(self, kept: _Kept, finder: SilenceFinder | None) -> Iterator[Window]:
        """The window that comes next, or nothing where silence was left out; what is kept shrinks.

        Of frames that are no more than one window and what surrounds it, all are taken.
        """
        left = self._left(kept)
        length: int | None = None
        if finder is not None:
            energies_T = frame_energies(kept.coming_TF)[:left]
            speech = finder.find(energies_T)
            if speech.begin >= left or (kept.is_start and speech.begin > 0):
                finder.forget(energies_T[: speech.begin])
                kept.drop(speech.begin, is_pause=True)
                return
            if speech.end is not None and speech.end <= self.window:
                length = speech.end
        is_pause = True
        if length is None:
            length = left
            if left > self.window + 2 * self.overlap:
                length, is_pause = self._quiet_end(kept.coming_TF)
        if finder is not None:
            finder.forget(energies_T[:length])
        end = kept.skip + length
        encoded_NTE = self._encode(kept.features_TF, end if is_pause else end + self.overlap)
        yield Window(encoded_NTE[:, kept.skip : end], kept.is_start, kept.begin)
        context = 0 if is_pause else end - max(0, end - self.overlap) // self._unit * self._unit
        kept.drop(length, context, is_pause=is_pause)

    def _left(self, kept: _Kept) -> int:
        return self._frames(kept.features_TF) - kept.skip

    def _frames(self, features_TF: Tensor) -> int:
        return (len(features_TF) - self._receptive_field) // SUBSAMPLING_FACTOR + 1

    def _only_window(self, features_TF: Tensor) -> Window:
        missing = self._receptive_field - len(features_TF)
        if missing > 0:
            features_TF = nn.functional.pad(features_TF[None], (0, 0, 0, missing), "replicate")[0]
        return Window(self._encode(features_TF, self._frames(features_TF)), True, 0)

    @torch.inference_mode()
    def _encode(self, features_TF: Tensor, frames: int) -> Tensor:
        """(1, frames, E) of the first features."""
        device = next(self.model.parameters()).device
        last = SUBSAMPLING_FACTOR * (frames - 1) + self._receptive_field
        window_NTF = features_TF[None, :last].to(device)
        encoded_NTE, _ = self.model.encode(window_NTF, torch.tensor([window_NTF.size(1)]))
        return encoded_NTE

    def _quiet_end(self, features_TF: Tensor) -> tuple[int, bool]:
        """Length of the next window: where the mean log-energy is smallest; is it a pause?"""
        shortest = (self.window + 1) // 2
        energies_T = features_TF[: SUBSAMPLING_FACTOR * (self.window + 1)].mean(dim=1)
        around_T = nn.functional.avg_pool1d(
            energies_T[None, None],
            SUBSAMPLING_FACTOR * _QUIET_FRAMES,
            stride=SUBSAMPLING_FACTOR,
            padding=SUBSAMPLING_FACTOR * _QUIET_FRAMES // 2,
            count_include_pad=False,
        )[0, 0]
        quietest, place = around_T[shortest : self.window + 1].min(dim=0)
        is_pause = bool(quietest < energies_T.quantile(_LOUD) - _PAUSE_DEPTH)
        return shortest + int(place), is_pause
