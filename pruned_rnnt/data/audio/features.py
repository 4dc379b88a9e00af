"""The features: 80 log-mel energies per 10 ms of audio at 16 kHz.

Axes: N batch, S samples, T feature frames, W samples of a frame, B bins of its spectrum, F mel
bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pruned_rnnt.data.audio.waveform import FloatArray, Pcm16Array

if TYPE_CHECKING:
    from lhotse import Fbank

SAMPLING_RATE = 16000
FEATURE_DIM = 80
# The extractor needs at least 15 ms for a frame.
MIN_SAMPLES = 240
# From one frame to the next.
FRAME_SAMPLES = SAMPLING_RATE // 100
_WINDOW = SAMPLING_RATE // 40
_SPECTRUM = 512
_PREEMPHASIS = 0.97
# Of the lowest and the highest mel filter.
_LOWEST_HERTZ, _HIGHEST_HERTZ = 20.0, SAMPLING_RATE / 2 - 400
_LEAST_ENERGY = torch.finfo(torch.float32).eps
# Frames that are computed at once, in about 10 KiB each.
_MOST_FRAMES = 100_000


def fbank_extractor() -> Fbank:
    """The feature extractor: lhotse's Fbank defaults with 80 mel bins at 16 kHz, as in icefall."""
    from lhotse import Fbank, FbankConfig

    return Fbank(FbankConfig(sampling_rate=SAMPLING_RATE, num_mel_bins=FEATURE_DIM))


def _log_mel(waves_NS: Tensor) -> Tensor:
    """(N, T, F) of float32 samples: every step is that of `fbank_extractor`.

    But the energies: lhotse squares absolute values, whose square roots take a CPU a third of the
    time. Importing lhotse takes longer than the features of ten minutes.
    """
    frames = frame_count(waves_NS.size(1))
    left = (_WINDOW - FRAME_SAMPLES) // 2
    right = (frames - 1) * FRAME_SAMPLES + _WINDOW - left - waves_NS.size(1)
    # Windows that exceed the samples see them mirrored.
    ends = waves_NS[:, :left].flip(1), waves_NS[:, -right:].flip(1)
    waves_NS = torch.cat((ends[0], waves_NS, ends[1]), dim=1)
    windows_NTW = waves_NS.unfold(1, _WINDOW, FRAME_SAMPLES)
    windows_NTW = windows_NTW - windows_NTW.mean(dim=2, keepdim=True)
    before_NTW = functional.pad(windows_NTW, (1, 0), mode="replicate")[:, :, :-1]
    window_W, filters_BF = _constants(waves_NS.device)
    windows_NTW = (windows_NTW - _PREEMPHASIS * before_NTW) * window_W
    parts_NTB2 = torch.view_as_real(torch.fft.rfft(windows_NTW, _SPECTRUM)).square_()
    energies_NTF = (parts_NTB2[..., 0] + parts_NTB2[..., 1]) @ filters_BF
    return energies_NTF.clamp_(min=_LEAST_ENERGY).log_()


@cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Kaldi's "povey" window, and the mel filters (B, F)."""
    with torch.inference_mode(False):  # they outlive the mode of their first user
        window_W = torch.hann_window(_WINDOW, periodic=False).pow(0.85)
        return window_W.to(device), _mel_filters().to(device)


def _mel_filters() -> Tensor:
    """(B, F) float32: triangles between equidistant points of the mel scale.

    Rounded like those of lhotse: float32, and numpy's logarithm.
    """
    lowest, highest = _mels(np.float64(_LOWEST_HERTZ)), _mels(np.float64(_HIGHEST_HERTZ))
    step = (highest - lowest) / (FEATURE_DIM + 1)
    edges_F = float(lowest) + torch.arange(FEATURE_DIM + 2) * float(step)
    hertz_B = np.arange(_SPECTRUM // 2, dtype=np.float32) * np.float32(SAMPLING_RATE / _SPECTRUM)
    mels_B = torch.from_numpy(_mels(hertz_B))
    left_F1, centre_F1, right_F1 = edges_F[:-2, None], edges_F[1:-1, None], edges_F[2:, None]
    rising_FB = (mels_B - left_F1) / (centre_F1 - left_F1)
    falling_FB = (right_F1 - mels_B) / (right_F1 - centre_F1)
    # The highest bin is beyond the highest filter. Products round by the order in memory.
    return functional.pad(torch.minimum(rising_FB, falling_FB).clamp(min=0), (0, 1)).T


def _mels(hertz: Any) -> Any:
    return 1127.0 * np.log(1 + hertz / 700)


def frame_count(samples: int) -> int:
    """Feature frames of this many samples."""
    return (max(samples, MIN_SAMPLES) + FRAME_SAMPLES // 2) // FRAME_SAMPLES


def most_samples(frames: int) -> int:
    """The most samples of which `frame_count` is at most `frames`."""
    return (frames + 1) * FRAME_SAMPLES - FRAME_SAMPLES // 2 - 1


def audio_features(samples_S: FloatArray) -> Tensor:
    """(T, F) float32 log-mel energies, as in training; at least one frame."""
    samples_S = np.pad(samples_S, (0, max(0, MIN_SAMPLES - len(samples_S))))
    return _log_mel(torch.from_numpy(samples_S)[None])[0]


def batch_features(
    samples: Sequence[FloatArray | Pcm16Array], device: torch.device, frames: int = 0
) -> tuple[Tensor, Tensor]:
    """The features of N recordings (S,), computed together on a device.

    Args:
        frames: the least T.

    Returns:
        (N, T, F) float32 on the device, as `audio_features` within rounding; undefined beyond the
        (N,) int64 frames of each, which are on the CPU.
    """
    lengths_N = torch.tensor([frame_count(len(samples_S)) for samples_S in samples])
    frames = max(frames, int(lengths_N.max()))
    waves_NS = _padded(
        samples, (frames - 1) * FRAME_SAMPLES + _WINDOW, pinned=device.type == "cuda"
    )
    waves_NS = waves_NS.to(device, non_blocking=True)
    rows = max(1, _MOST_FRAMES // frames)
    features = [
        # Exact: the factor is a power of two.
        _log_mel(part_NS.float().mul_(2**-15) if part_NS.dtype == torch.int16 else part_NS)
        for part_NS in waves_NS.split(rows)
    ]
    features_NTF = features[0] if len(features) == 1 else torch.cat(features)
    return features_NTF[:, :frames], lengths_N


def _padded(samples: Sequence[FloatArray | Pcm16Array], size: int, *, pinned: bool) -> Tensor:
    """Recordings (S,) as rows (N, size): integers if all are, which halves the bytes to transfer.

    Windows that exceed a recording see it mirrored, as `_log_mel` does at the end of a row.
    """
    are_integers = all(samples_S.dtype == np.int16 for samples_S in samples)
    dtype = torch.int16 if are_integers else torch.float32
    padded_NS = torch.empty((len(samples), size), dtype=dtype, pin_memory=pinned)
    for row_S, samples_S in zip(padded_NS.numpy(), samples, strict=True):
        count = max(len(samples_S), MIN_SAMPLES)
        row_S[: len(samples_S)] = samples_S
        row_S[len(samples_S) :] = 0
        if samples_S.dtype == np.int16 and not are_integers:
            row_S[: len(samples_S)] *= 2**-15
        end = frame_count(count) * FRAME_SAMPLES + (_WINDOW - FRAME_SAMPLES) // 2
        row_S[count:end] = row_S[count - max(0, end - count) : count][::-1]
    return padded_NS
