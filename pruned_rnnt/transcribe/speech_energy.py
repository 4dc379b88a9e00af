"""Finds speech by its energy above the noise: in a batch of segments, or in a stream.

A frame is speech unless one of two rules holds.

1. It is close to the noise. The noise is estimated for each mel bin, so that hum in some bins
   does not hide speech in others; its level is the root mean square of the excess over the bins.
2. It is steady: most changes in 50 ms nearby are small. This rule finds pauses whose noise differs
   from that of the rest, as in recordings of several rooms. Speech is hardly ever that steady, not
   even far from the microphone. Frames that a stream decides may be left out, so there it must be
   far below the loudest speech, too.

Frames whose samples are all zero (digital silence) are a class of their own: training data always
has some noise, and some models emit words for silence without any.

Axes: N batch, T feature frames (10 ms), P pooled frames (50 ms), F mel bins. All levels and
energies are natural logarithms.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from pruned_rnnt.data.audio.features import FEATURE_DIM
from pruned_rnnt.data.audio.waveform import FloatArray

# Log-energies of such frames are -15.94; noise of one step of 16 bits has -15.1.
_DIGITAL_SILENCE = -15.5


def is_digital_silence(features_XF: Tensor) -> Tensor:
    """(..., F) log-mel features -> (...) bool, True for frames whose samples are all zero."""
    return features_XF.mean(dim=-1) < _DIGITAL_SILENCE


# Frames are decided in steps of 2 s, from the 30 s before and the 3 s after them,
# so that the result does not depend on the sizes of the pieces in which the features arrive.
_STEP_FRAMES, _AHEAD_FRAMES, _CONTEXT_FRAMES = 200, 300, 200
_POOL_FRAMES = 5
_MEMORY_POOLED = 30 * 100 // _POOL_FRAMES
# The noise of a mel bin is its 10th percentile: pauses and closures are that common in any speech.
_NOISE_QUANTILE, _SPEECH_QUANTILE = 0.1, 0.98
# A frame is close to the noise up to this fraction of the way from the noise to the speech, but at
# least to 2 dB (0.5) and at most to 6.5 dB (1.5) above the noise: a quiet speaker is speech, too.
_FRACTION, _LEAST_EXCESS, _MOST_EXCESS = 0.25, 0.5, 1.5
# In silence, the remembered level of speech decays: in a minute, the excess over the noise by a
# sixth, and the energy by 1.3 dB.
_DECAY, _FADE = 0.994, 0.01
_SMOOTHING_FRAMES = 3
# Far below the loudest sound within 1.5 s on both sides, or the remembered speech: 13 dB (3.0).
_DEPTH, _NEARBY_FRAMES = 3.0, 150
# Steady: within 0.3 s on both sides, most changes in 50 ms are below 1.5 dB (0.35) of the energy,
# or below 0.4 dB (0.1) of the level, which as a mean over the bins changes less.
_ENERGY_CHANGE, _LEVEL_CHANGE = 0.35, 0.1
_CHANGE_FRAMES, _STEADY_FRAMES = 5, 30


# Speech by its contrast: 15 dB (3.5) above the least energy within a second, for so many frames.
# Less energy for up to twice `_FILLED_FRAMES` between louder frames does not end it.
_CONTRAST, _CONTRAST_FRAMES, _FILLED_FRAMES, _LEAST_FRAMES = 3.5, 100, 25, 40
# A stream adds what is 20 dB (4.5) below the loudest speech for 0.8 s; single frames, to find
# pauses, must be 10 dB (2.3) above that least energy, and not steady.
_QUIET_DEPTH, _SOUND, _LOW_FRAMES = 4.5, 2.3, 80


class LocalSpeech(NamedTuple):
    """energy_NT: smoothed, with short gaps filled. is_speech_NT: bool."""

    energy_NT: Tensor
    is_speech_NT: Tensor


def local_speech(features_NTF: Tensor, real_NT: Tensor) -> LocalSpeech:
    """Frames that are speech by their contrast to the second before and after them.

    This finds speech far quieter than the rest, which the levels of the whole do not.

    Args:
        real_NT: bool, False beyond the ends; the energy is of no use there.
    """
    energy_NT = _smooth(features_NTF.logsumexp(dim=2) * real_NT) / _smooth(real_NT.float())
    louder_NT = _largest_nearby(energy_NT.masked_fill(~real_NT, -torch.inf), _FILLED_FRAMES)
    filled_NT = -_largest_nearby(-louder_NT.masked_fill(~real_NT, torch.inf), _FILLED_FRAMES)
    least_NT = -_largest_nearby(-energy_NT.masked_fill(~real_NT, torch.inf), _CONTRAST_FRAMES)
    is_speech_NT = real_NT & (filled_NT > least_NT + _CONTRAST)
    return LocalSpeech(filled_NT, in_long_rows(is_speech_NT))


def in_long_rows(is_true_NT: Tensor, frames: int = _LEAST_FRAMES) -> Tensor:
    """(N, T) bool: the true frames that are in a row of at least so many."""
    other_NT = nn.functional.pad(1 - is_true_NT.float(), (0, frames - 1), value=1.0)
    begins_NT = nn.functional.pad(
        1 - nn.functional.max_pool1d(other_NT, frames, 1), (frames - 1, 0)
    )
    return nn.functional.max_pool1d(begins_NT, frames, stride=1) > 0


def runs(is_true_T: Tensor) -> list[tuple[int, int]]:
    """The first frame and the end (exclusive) of each row of true frames; (T,) bool, on the CPU."""
    places = torch.diff(nn.functional.pad(is_true_T.int(), (1, 1))).nonzero()[:, 0].tolist()
    return list(zip(places[::2], places[1::2], strict=True))


def _largest_nearby(values_NT: Tensor, frames: int) -> Tensor:
    return nn.functional.max_pool1d(values_NT, 2 * frames + 1, stride=1, padding=frames)


class _Levels(NamedTuple):
    """The noise of each mel bin; the level of the noise, and how far that of speech is above it.

    Without any sound, the noise is infinite.
    """

    bins_N1F: Tensor
    noise_N: Tensor
    contrast_N: Tensor


def speech_frames(features_NTF: Tensor, lengths_N: Tensor) -> Tensor:
    """(N, T) bool on the device: the frames of each segment that are speech."""
    real_NT = torch.arange(features_NTF.size(1), device=features_NTF.device) < lengths_N[:, None]
    # Of pooled frames, a shorter rest does not count.
    pooled_NPF = _pooled(features_NTF)
    ends_P = _POOL_FRAMES * torch.arange(1, pooled_NPF.size(1) + 1, device=features_NTF.device)
    levels = _levels(pooled_NPF, ends_P <= lengths_N[:, None])
    level_NT = _level(features_NTF, real_NT, levels)
    is_loud_NT = real_NT & _is_above_noise(level_NT, levels)
    is_speech_NT = is_loud_NT & ~_is_steady(level_NT, real_NT, _LEVEL_CHANGE)
    return is_speech_NT | far_quieter_speech(features_NTF, lengths_N)


def far_quieter_speech(features_NTF: Tensor, lengths_N: Tensor) -> Tensor:
    """(N, T) bool on the device: speech that the levels of the whole miss beside louder speech."""
    real_NT = torch.arange(features_NTF.size(1), device=features_NTF.device) < lengths_N[:, None]
    energy_NT = _smooth(features_NTF.logsumexp(dim=2) * real_NT) / _smooth(real_NT.float())
    loudest_N1 = energy_NT.masked_fill(~real_NT, -torch.inf).amax(dim=1, keepdim=True)
    is_quiet_NT = real_NT & (energy_NT < loudest_N1 - _DEPTH)
    is_steady_NT = _is_steady(energy_NT, is_quiet_NT, _ENERGY_CHANGE)
    return _far_below(features_NTF, real_NT, energy_NT, loudest_N1) & ~is_steady_NT


class EnergyDetector:
    """Distinguishes speech from noise in one stream, in constant memory."""

    def __init__(self) -> None:
        # The frames not decided yet, after up to `_CONTEXT_FRAMES` decided ones.
        self._features_TF = torch.zeros(0, FEATURE_DIM)
        self._decided = 0
        self._pooled_PF = torch.zeros(0, FEATURE_DIM)
        self._contrast_N = torch.zeros(1)
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
        known_NTF = self._features_TF[None, : end + _AHEAD_FRAMES]
        pooled_NPF = torch.cat((self._pooled_PF[None], _pooled(known_NTF[:, begin:])), dim=1)
        all_NP = torch.ones(pooled_NPF.shape[:2], dtype=torch.bool)
        levels = _levels(pooled_NPF, all_NP)
        self._contrast_N = torch.maximum(levels.contrast_N, _DECAY * self._contrast_N)
        levels = levels._replace(contrast_N=self._contrast_N)
        real_NT = torch.ones(known_NTF.shape[:2], dtype=torch.bool)
        is_speech_NT = _is_above_noise(_level(known_NTF, real_NT, levels), levels)
        loud = _quantile(pooled_NPF.logsumexp(dim=2, keepdim=True), all_NP, _SPEECH_QUANTILE)
        self._loud = max(float(loud), self._loud - _FADE)
        energy_NT = _smooth(known_NTF.logsumexp(dim=2)) / _smooth(real_NT.float())
        nearby_NT = nn.functional.max_pool1d(energy_NT, 2 * _NEARBY_FRAMES + 1, 1, _NEARBY_FRAMES)
        is_quiet_NT = energy_NT < nearby_NT.clamp(min=self._loud) - _DEPTH
        is_steady_NT = _is_steady(energy_NT, is_quiet_NT, _ENERGY_CHANGE)
        is_speech_NT &= ~(is_quiet_NT & is_steady_NT)
        # Both rules miss speech that is far quieter than what was before.
        loud_NT = nearby_NT.clamp(min=self._loud)
        is_speech_NT |= _far_below(known_NTF, real_NT, energy_NT, loud_NT) & ~is_steady_NT
        self._pooled_PF = pooled_NPF[0, : len(self._pooled_PF) + -(-frames // _POOL_FRAMES)]
        self._pooled_PF = self._pooled_PF[-_MEMORY_POOLED:]
        drop = max(0, end - _CONTEXT_FRAMES)
        self._features_TF = self._features_TF[drop:]
        self._decided = end - drop
        return is_speech_NT[0, begin:end]


def _far_below(features_NTF: Tensor, real_NT: Tensor, energy_NT: Tensor, loud_NT: Tensor) -> Tensor:
    """(N, T) bool: sounds of speech that is far below the energy of loud speech."""
    local = local_speech(features_NTF, real_NT)
    is_low_NT = local.energy_NT < loud_NT - _QUIET_DEPTH
    # Beyond the ends, the energy may be NaN, which would spread.
    least_NT = -_largest_nearby(-energy_NT.masked_fill(~real_NT, torch.inf), _CONTRAST_FRAMES)
    is_sound_NT = energy_NT - least_NT > _SOUND
    return in_long_rows(is_low_NT & local.is_speech_NT, _LOW_FRAMES) & is_sound_NT


def _levels(pooled_NPF: Tensor, used_NP: Tensor) -> _Levels:
    # Digital silence is no estimate of the noise: it comes from cutting and joining.
    used_NP = used_NP & ~is_digital_silence(pooled_NPF)
    bins_N1F = _quantile(pooled_NPF, used_NP, _NOISE_QUANTILE)
    level_NP1 = _excess(pooled_NPF, bins_N1F)[:, :, None]
    noise_N = _quantile(level_NP1, used_NP, _NOISE_QUANTILE).flatten()
    speech_N = _quantile(level_NP1, used_NP, _SPEECH_QUANTILE).flatten()
    return _Levels(bins_N1F, noise_N, (speech_N - noise_N).nan_to_num(0))


def _level(features_NTF: Tensor, real_NT: Tensor, levels: _Levels) -> Tensor:
    """(N, T): the smoothed level; of no use beyond the end."""
    return _smooth(_excess(features_NTF, levels.bins_N1F) * real_NT) / _smooth(real_NT.float())


def _is_above_noise(level_NT: Tensor, levels: _Levels) -> Tensor:
    """(N, T) bool."""
    margin_N = (_FRACTION * levels.contrast_N).clamp(_LEAST_EXCESS, _MOST_EXCESS)
    return level_NT >= (levels.noise_N + margin_N)[:, None]


def _is_steady(values_NT: Tensor, usable_NT: Tensor, change: float) -> Tensor:
    """(N, T) bool: whether most changes between usable frames nearby are below `change`."""
    before = _CHANGE_FRAMES // 2
    change_NT = (values_NT[:, _CHANGE_FRAMES:] - values_NT[:, :-_CHANGE_FRAMES]).abs()
    usable_NT = usable_NT[:, _CHANGE_FRAMES:] & usable_NT[:, :-_CHANGE_FRAMES]
    votes_NT = torch.where(usable_NT, torch.where(change_NT < change, 1.0, -1.0), 0.0)
    votes_NT = nn.functional.pad(votes_NT, (before, _CHANGE_FRAMES - before))
    votes_NT = votes_NT[:, : values_NT.size(1)]
    # Undecided at the end of a short segment, and for single quiet frames.
    return _mean_nearby(votes_NT, _STEADY_FRAMES) >= 0


def _pooled(features_NTF: Tensor) -> Tensor:
    """(N, T, F) -> (N, P, F): means over 50 ms; a shorter rest counts as one."""
    pooled_NFP = nn.functional.avg_pool1d(
        features_NTF.transpose(1, 2), _POOL_FRAMES, ceil_mode=True, count_include_pad=False
    )
    return pooled_NFP.transpose(1, 2)


def _smooth(values_NT: Tensor) -> Tensor:
    return _mean_nearby(values_NT, _SMOOTHING_FRAMES)


def _mean_nearby(values_NT: Tensor, frames: int) -> Tensor:
    """The mean of so many frames on both sides, which are 0 beyond the ends."""
    return nn.functional.avg_pool1d(values_NT, 2 * frames + 1, stride=1, padding=frames)


def _quantile(values_NPX: Tensor, used_NP: Tensor, fraction: float) -> Tensor:
    """(N, 1, X): the quantile of the used values along P, without interpolation; or infinity."""
    usable_NPX = values_NPX.masked_fill(~used_NP[:, :, None], torch.inf)
    places_N = (fraction * (used_NP.sum(dim=1) - 1).clamp(min=0)).round().long()
    if usable_NPX.device.type == "cpu":  # in half the time of a sort
        pairs = zip(usable_NPX, places_N.tolist(), strict=True)
        return torch.stack([x_PX.kthvalue(k + 1, dim=0, keepdim=True).values for x_PX, k in pairs])
    sorted_NPX = usable_NPX.sort(dim=1).values
    return sorted_NPX.gather(1, places_N[:, None, None].expand(-1, 1, values_NPX.size(2)))


def _excess(features_NTF: Tensor, bins_N1F: Tensor) -> Tensor:
    """(N, T, F) -> (N, T): the root mean square of the excess over the noise."""
    return (features_NTF - bins_N1F).clamp(min=0).square().mean(dim=2).sqrt()
