"""Finds speech by its energy above the noise, in a stream and in constant memory.

A frame is speech unless one of two rules holds.

1. It is close to the noise. The noise is estimated for each mel bin, so that hum in some bins
   does not hide speech in others; the measure is the root mean square of the excess over the bins.
2. It is far below the loudest speech, and so are its neighbours, and their energy is steady. This
   rule finds pauses whose noise differs from that of the rest, as in recordings of several rooms.
   The energy of speech is never that steady, not even far from the microphone.

Axes: T feature frames (10 ms), P pooled frames (50 ms), F mel bins. All levels and energies are
natural logarithms.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pruned_rnnt.data.audio.features import FEATURE_DIM
from pruned_rnnt.data.audio.waveform import FloatArray
from pruned_rnnt.transcribe.silence import is_digital_silence

# Frames are decided in steps of 2 s, from the 30 s before and the 3 s after them,
# so that the result does not depend on the sizes of the pieces in which the features arrive.
_STEP_FRAMES, _AHEAD_FRAMES, _CONTEXT_FRAMES = 200, 300, 200
POOL_FRAMES = 5
_MEMORY_POOLED = 30 * 100 // POOL_FRAMES
# The noise of a mel bin is its 10th percentile: pauses and closures are that common in any speech.
NOISE_QUANTILE, SPEECH_QUANTILE = 0.1, 0.98
# A frame is close to the noise up to this fraction of the way from the noise to the speech, but at
# least to 2 dB (0.5) and at most to 6.5 dB (1.5) above the noise: a quiet speaker is speech, too.
FRACTION, LEAST_EXCESS, MOST_EXCESS = 0.25, 0.5, 1.5
# In silence, the remembered level of speech decays: in a minute, the excess over the noise by a
# sixth, and the energy by 1.3 dB.
_DECAY, _FADE = 0.994, 0.01
SMOOTHING_FRAMES = 3
# Far below the loudest sound within 1.5 s on both sides, or the remembered speech: 13 dB (3.0).
_DEPTH, _NEARBY_FRAMES = 3.0, 150
# Steady: within 0.3 s on both sides, the median change in 50 ms is below 1.5 dB (0.35).
_CHANGE, _CHANGE_FRAMES, _STEADY_FRAMES = 0.35, 5, 30


class EnergyDetector:
    """Distinguishes speech from noise; one object for one stream."""

    def __init__(self) -> None:
        # The frames not decided yet, after up to `_CONTEXT_FRAMES` decided ones.
        self._features_TF = torch.zeros(0, FEATURE_DIM)
        self._decided = 0
        self._pooled_PF = torch.zeros(0, FEATURE_DIM)
        self._contrast = 0.0
        self._loud = -torch.inf

    def accept(self, samples_S: FloatArray, features_TF: Tensor) -> Tensor:
        """More (T, F) features -> (T',) bool, True for speech: the next frames that are decided."""
        self._features_TF = torch.cat((self._features_TF, features_TF))
        found = [torch.zeros(0, dtype=torch.bool)]
        while len(self._features_TF) - self._decided >= _STEP_FRAMES + _AHEAD_FRAMES:
            found.append(self._step(_STEP_FRAMES))
        return torch.cat(found)

    def finish(self) -> Tensor:
        """(T',) bool of the remaining frames, at the end of the stream."""
        found = [torch.zeros(0, dtype=torch.bool)]
        while (left := len(self._features_TF) - self._decided) > 0:
            found.append(self._step(min(_STEP_FRAMES, left)))
        return torch.cat(found)

    def _step(self, frames: int) -> Tensor:
        """Decide the next frames."""
        begin, end = self._decided, self._decided + frames
        known_TF = self._features_TF[: end + _AHEAD_FRAMES]
        pooled_PF = torch.cat((self._pooled_PF, _pooled(known_TF[begin:])))
        loud = float(_quantile(pooled_PF.logsumexp(dim=1), SPEECH_QUANTILE))
        self._loud = max(loud, self._loud - _FADE)
        is_noise_T = self._is_close_to_noise(known_TF, pooled_PF)
        is_noise_T |= _is_quiet_and_steady(known_TF, self._loud)
        self._pooled_PF = pooled_PF[: len(self._pooled_PF) + -(-frames // POOL_FRAMES)]
        self._pooled_PF = self._pooled_PF[-_MEMORY_POOLED:]
        drop = max(0, end - _CONTEXT_FRAMES)
        self._features_TF = self._features_TF[drop:]
        self._decided = end - drop
        return ~is_noise_T[begin:end]

    def _is_close_to_noise(self, known_TF: Tensor, pooled_PF: Tensor) -> Tensor:
        """(T,) bool of the known frames, from the (P, F) ones of the last 30 s."""
        # Digital silence is no estimate of the noise: it comes from cutting and joining.
        sounds_PF = pooled_PF[~is_digital_silence(pooled_PF)]
        if not len(sounds_PF):
            return torch.ones(len(known_TF), dtype=torch.bool)
        noise_F = _quantile(sounds_PF, NOISE_QUANTILE)
        level_P = _excess(sounds_PF, noise_F)
        noise = float(_quantile(level_P, NOISE_QUANTILE))
        speech = float(_quantile(level_P, SPEECH_QUANTILE))
        self._contrast = max(speech - noise, _DECAY * self._contrast)
        threshold = noise + min(max(FRACTION * self._contrast, LEAST_EXCESS), MOST_EXCESS)
        return _smooth(_excess(known_TF, noise_F)) < threshold


def _is_quiet_and_steady(known_TF: Tensor, loud: float) -> Tensor:
    """(T,) bool; loud: the energy of speech."""
    energy_T = _smooth(known_TF.logsumexp(dim=1))
    nearby_T = nn.functional.max_pool1d(energy_T[None], 2 * _NEARBY_FRAMES + 1, 1, _NEARBY_FRAMES)[
        0
    ]
    is_quiet_T = energy_T < nearby_T.clamp(min=loud) - _DEPTH
    if len(energy_T) <= _CHANGE_FRAMES:
        return is_quiet_T
    change_T = (energy_T[_CHANGE_FRAMES:] - energy_T[:-_CHANGE_FRAMES]).abs()
    both_T = is_quiet_T[_CHANGE_FRAMES:] & is_quiet_T[:-_CHANGE_FRAMES]
    change_T = torch.where(both_T, change_T, torch.nan)
    before = _STEADY_FRAMES + _CHANGE_FRAMES // 2
    around_T = nn.functional.pad(
        change_T, (before, 2 * _STEADY_FRAMES + _CHANGE_FRAMES - before), value=torch.nan
    )
    median_T = around_T.unfold(0, 2 * _STEADY_FRAMES + 1, 1).nanmedian(dim=1).values
    return is_quiet_T & ~(median_T >= _CHANGE)


def _pooled(features_TF: Tensor) -> Tensor:
    """(T, F) -> (P, F): means over 50 ms; a shorter rest counts as one."""
    return nn.functional.avg_pool1d(
        features_TF.T, POOL_FRAMES, ceil_mode=True, count_include_pad=False
    ).T


def _smooth(values_T: Tensor) -> Tensor:
    return nn.functional.avg_pool1d(
        values_T[None],
        2 * SMOOTHING_FRAMES + 1,
        stride=1,
        padding=SMOOTHING_FRAMES,
        count_include_pad=False,
    )[0]


def _excess(features_TF: Tensor, noise_F: Tensor) -> Tensor:
    """(T, F) -> (T,)"""
    return (features_TF - noise_F).clamp(min=0).square().mean(dim=1).sqrt()


def _quantile(values: Tensor, fraction: float) -> Tensor:
    """The quantile along the first axis, without interpolation."""
    return values.kthvalue(1 + round(fraction * (len(values) - 1)), dim=0).values
