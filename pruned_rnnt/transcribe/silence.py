"""Where a recording is silent: far below its speech, and steadily so.

Axes: T feature frames (10 ms), T' encoder frames (40 ms), F mel bins. Energies are the mean over
the mel bins of natural-log energies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from pruned_rnnt.model.subsampling import SUBSAMPLING_FACTOR

# Silence is 13 dB below the loud speech of the last minute and varies by less than 6 dB over 0.6 s:
# a speaker far from the microphone goes up and down with each syllable.
_LOUD, _DEPTH = 0.9, 3.0
_STEADY, _AROUND = 1.4, 7
# Digital silence is silence in a recording without speech, too: log-energies end at -15.9.
_NOTHING = -15.5
_MEMORY = round(60 / 0.04)
# So many silent frames part utterances. What is within 0.3 s of speech is not steady, and stays: a
# pause of a second is the shortest of these.
_LONG = 10


class Speech(NamedTuple):
    """Where speech lies in what is kept: encoder frames.

    begin: silence goes before; beyond the last frame where all is silent.
    end: the first long silence after it starts; None where none does.
    """

    begin: int
    end: int | None


def frame_energies(features_TF: Tensor) -> Tensor:
    """(T, F) -> (T',)"""
    energies_T = features_TF.mean(dim=1)
    return nn.functional.avg_pool1d(energies_T[None, None], SUBSAMPLING_FACTOR)[0, 0]


def is_digital_silence(features_TF: Tensor) -> Tensor:
    """(T,) whether a frame of (T, F) features is of samples that are all zero."""
    return features_TF.mean(dim=1) < _NOTHING


class SilenceFinder:
    """Finds silence in a stream by what was heard in its last minute."""

    def __init__(self) -> None:
        self._heard_T = torch.zeros(0)

    def forget(self, energies_T: Tensor) -> None:
        """(T',) energies of frames which `find` will not be given again."""
        self._heard_T = torch.cat((self._heard_T, energies_T))[-_MEMORY:]

    def find(self, energies_T: Tensor) -> Speech:
        """The first speech among (T',) energies, which follow what was forgotten."""
        known_T = torch.cat((self._heard_T, energies_T))
        length = len(energies_T)
        is_quiet_T = energies_T < max(_NOTHING, float(known_T.quantile(_LOUD)) - _DEPTH)
        spread_T = _highest_around(energies_T) + _highest_around(-energies_T)
        is_silent_T = is_quiet_T & (spread_T < _STEADY)
        speech = (~is_silent_T).nonzero()[:, 0]
        if not len(speech):
            return Speech(length, None)
        begin = int(speech[0])
        begin = begin if begin >= _LONG else 0
        steps = torch.diff(speech, append=torch.tensor([length]))
        long = (steps > _LONG).nonzero()[:, 0]
        return Speech(begin, int(speech[long[0]]) + 1 if len(long) else None)


def _highest_around(values_T: Tensor) -> Tensor:
    return nn.functional.max_pool1d(values_T[None, None], 2 * _AROUND + 1, 1, _AROUND)[0, 0]
