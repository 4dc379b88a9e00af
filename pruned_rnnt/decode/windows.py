"""Audio of any length through the encoder, window by window, in constant memory.

Axes: T feature frames (10 ms), T' encoder frames (40 ms), F mel bins, E encoder width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pruned_rnnt.model.subsampling import SUBSAMPLING_FACTOR
from pruned_rnnt.model.transducer import TransducerModel

# Encoder frames around a frame that tell how quiet it is there: 0.3 s.
_QUIET_FRAMES = 7
# A place is a pause where the mean log-energy is this much below that of loud speech: 13 dB.
_PAUSE_DEPTH = 3.0
_LOUD = 0.9
# Windows of encoders without chunks begin at a multiple of this, so that an encoder that halves its
# frames inside pairs the same ones in every window.
_UNIT = 16


class Window(NamedTuple):
    """encoded_NTE: (1, T', E), the frames that follow those of the window before.

    is_start: speech starts anew here, after a pause or at the beginning: the frames are encoded
    without anything before them, and a search should start anew, too.
    """

    encoded_NTE: Tensor
    is_start: bool


class WindowEncoder:
    """Encoder output of a stream of features, window by window.

    A window ends where it is quiet, between half its length and its whole. Where that is a pause,
    the next one begins like a new utterance. Where it is none, both are encoded with `overlap`
    frames of their surroundings, of which nothing is kept, as if they had been encoded at once.
    Audio that is no longer than window + 2 overlap is one window.

    Args:
        window, overlap: in encoder frames; at least 1 and 0.
    """

    def __init__(self, model: TransducerModel, window: int, overlap: int) -> None:
        self.model = model
        self.window = window
        self.overlap = overlap
        self._receptive_field = model.encoder.receptive_field
        config = model.encoder.config
        self._unit = config.stream_sizes[0] if config.causal else _UNIT

    def __call__(self, pieces: Iterable[Tensor]) -> Iterator[Window]:
        """The windows of a stream's features, which come in pieces (T, F).

        At least one frame comes out, whatever goes in.
        """
        kept_TF: Tensor | None = None
        skip = 0  # encoder frames of the kept features which were given out
        is_start = True
        need = self.window + 2 * self.overlap
        for piece_TF in pieces:
            kept_TF = piece_TF if kept_TF is None else torch.cat((kept_TF, piece_TF))
            while self._frames(kept_TF) > skip + need:
                length, is_pause = self._quiet_end(kept_TF, skip)
                end = skip + length
                encoded_NTE = self._encode(kept_TF, end if is_pause else end + self.overlap)
                yield Window(encoded_NTE[:, skip:end], is_start)
                drop = end
                if not is_pause:
                    drop = max(0, end - self.overlap) // self._unit * self._unit
                kept_TF = kept_TF[SUBSAMPLING_FACTOR * drop :]
                skip, is_start = end - drop, is_pause
        if kept_TF is None:
            return
        missing = self._receptive_field - len(kept_TF)
        if missing > 0:
            kept_TF = nn.functional.pad(kept_TF[None], (0, 0, 0, missing), "replicate")[0]
        yield Window(self._encode(kept_TF, self._frames(kept_TF))[:, skip:], is_start)

    def _frames(self, features_TF: Tensor) -> int:
        return (len(features_TF) - self._receptive_field) // SUBSAMPLING_FACTOR + 1

    @torch.inference_mode()
    def _encode(self, features_TF: Tensor, frames: int) -> Tensor:
        """(1, frames, E) of the first features."""
        device = next(self.model.parameters()).device
        last = SUBSAMPLING_FACTOR * (frames - 1) + self._receptive_field
        window_NTF = features_TF[None, :last].to(device)
        encoded_NTE, _ = self.model.encode(window_NTF, torch.tensor([window_NTF.size(1)]))
        return encoded_NTE

    def _quiet_end(self, features_TF: Tensor, begin: int) -> tuple[int, bool]:
        """Length of the next window: where the mean log-energy is smallest; is it a pause?"""
        shortest = (self.window + 1) // 2
        energies_T = features_TF[SUBSAMPLING_FACTOR * begin :].mean(dim=1)
        energies_T = energies_T[: SUBSAMPLING_FACTOR * (self.window + 1)]
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
