"""Find silence in a recording: frames far below its speech, at a steady level.

Axes: T feature frames (10 ms), T' encoder frames (40 ms), F mel bins. An energy is the mean
of the natural-log energies of a frame's mel bins.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from pruned_rnnt.decode.frame_times import FRAME_SECONDS
from pruned_rnnt.model.subsampling import SUBSAMPLING_FACTOR

# Silence is 13 dB (3.0) below the 90th percentile of the last minute's energies, and varies by less
# than 6 dB (1.4) within 0.3 s on both sides. The energy of a speaker far from the microphone varies
# more than that, from syllable to syllable.
_LOUD_QUANTILE, _DEPTH = 0.9, 3.0
_STEADY, _AROUND_FRAMES = 1.4, 7
# Digital silence counts as silence even in a recording without speech: log-energies end at -15.9.
_DIGITAL_SILENCE = -15.5
_MEMORY_FRAMES = round(60 / FRAME_SECONDS)
# This many silent frames separate utterances. Frames within 0.3 s of speech are not steady and do
# not count, so that the shortest separating pause is one second.
_LONG_FRAMES = 10


class Speech(NamedTuple):
    """The first stretch of speech among some encoder frames.

    begin: its first frame if a long silence precedes it, else 0; the number of frames if all are
        silent.
    end: the first frame of the long silence after it; None if there is no such silence.
    """

    begin: int
    end: int | None


def frame_energies(features_TF: Tensor) -> Tensor:
    """(T, F) -> (T',)"""
    energies_T = features_TF.mean(dim=1)
    return nn.functional.avg_pool1d(energies_T[None, None], SUBSAMPLING_FACTOR)[0, 0]


def is_digital_silence(features_TF: Tensor) -> Tensor:
    """(T,) bool of (T, F) features: True for a frame whose samples are all zero."""
    return features_TF.mean(dim=1) < _DIGITAL_SILENCE


class SilenceFinder:
    """Finds silence in a stream, relative to the energies of its last minute."""

    def __init__(self) -> None:
        self._past_T = torch.zeros(0)

    def advance(self, energies_T: Tensor) -> None:
        """Move past frames with (T',) energies, which later calls of `find` leave out."""
        self._past_T = torch.cat((self._past_T, energies_T))[-_MEMORY_FRAMES:]

    def find(self, energies_T: Tensor) -> Speech:
        """The first speech among (T',) energies of the frames that follow those moved past."""
        known_T = torch.cat((self._past_T, energies_T))
        length = len(energies_T)
        is_quiet_T = energies_T < max(
            _DIGITAL_SILENCE, float(known_T.quantile(_LOUD_QUANTILE)) - _DEPTH
        )
        spread_T = _max_around(energies_T) + _max_around(-energies_T)
        is_silent_T = is_quiet_T & (spread_T < _STEADY)
        speech = (~is_silent_T).nonzero()[:, 0]
        if not len(speech):
            return Speech(length, None)
        begin = int(speech[0])
        begin = begin if begin >= _LONG_FRAMES else 0
        steps = torch.diff(speech, append=torch.tensor([length]))
        long = (steps > _LONG_FRAMES).nonzero()[:, 0]
        return Speech(begin, int(speech[long[0]]) + 1 if len(long) else None)


def _max_around(values_T: Tensor) -> Tensor:
    return nn.functional.max_pool1d(
        values_T[None, None], 2 * _AROUND_FRAMES + 1, 1, _AROUND_FRAMES
    )[0, 0]
