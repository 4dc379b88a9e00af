"""Audio of any length through the encoder, window by window, in constant memory.

Axes: T feature frames (10 ms), T' encoder frames (40 ms), F mel bins, E encoder width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from pruned_rnnt.model.subsampling import SUBSAMPLING_FACTOR
from pruned_rnnt.model.transducer import TransducerModel

# Encoder frames around a frame that tell how quiet it is there: 0.3 s.
_QUIET_FRAMES = 7
# Windows of encoders without chunks begin at a multiple of this, so that an encoder that halves its
# frames inside pairs the same ones in every window.
_UNIT = 16


class WindowEncoder:
    """Encoder output of a stream of features, as if it had been encoded at once.

    Each window is encoded with `overlap` frames of its surroundings, of which nothing is kept; it
    ends where it is quiet, between half its length and its whole. Audio that is no longer than
    window + 2 overlap is encoded at once.

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

    def __call__(self, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
        """Pieces (T, F) of a stream's features -> (1, T', E), one after the other.

        At least one frame comes out, whatever goes in.
        """
        kept_TF: Tensor | None = None
        origin = 0  # encoder frame with which the kept features begin
        done = 0  # encoder frames given out
        need = self.window + 2 * self.overlap
        for piece_TF in pieces:
            kept_TF = piece_TF if kept_TF is None else torch.cat((kept_TF, piece_TF))
            while self._frames(kept_TF) > done - origin + need:
                end = done + self._quiet_end(kept_TF, done - origin)
                encoded_NTE = self._encode(kept_TF, end - origin + self.overlap)
                yield encoded_NTE[:, done - origin : end - origin]
                done = end
                ahead = max(0, done - self.overlap) // self._unit * self._unit - origin
                kept_TF = kept_TF[SUBSAMPLING_FACTOR * ahead :]
                origin += ahead
        if kept_TF is None:
            return
        missing = self._receptive_field - len(kept_TF)
        if missing > 0:
            kept_TF = nn.functional.pad(kept_TF[None], (0, 0, 0, missing), "replicate")[0]
        yield self._encode(kept_TF, self._frames(kept_TF))[:, done - origin :]

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

    def _quiet_end(self, features_TF: Tensor, begin: int) -> int:
        """Length of the next window: where the log-energies are smallest in the mean."""
        shortest = (self.window + 1) // 2
        energies_T = features_TF[SUBSAMPLING_FACTOR * begin :].mean(dim=1)
        energies_T = energies_T[: SUBSAMPLING_FACTOR * (self.window + 1)]
        around = nn.functional.avg_pool1d(
            energies_T[None, None],
            SUBSAMPLING_FACTOR * _QUIET_FRAMES,
            stride=SUBSAMPLING_FACTOR,
            padding=SUBSAMPLING_FACTOR * _QUIET_FRAMES // 2,
            count_include_pad=False,
        )[0, 0]
        return shortest + int(around[shortest : self.window + 1].argmin())
