"""NeMo's log-mel energies per 10 ms of audio at 16 kHz, without normalisation.

Axes: N recordings, S samples, T feature frames, F mel bins, B bins of the spectrum.

Beside the features of this package: pre-emphasis, a Hann window of 25 ms in a spectrum of 512
samples, Slaney's mel scale with filters of equal area, and frames whose centre is at a multiple of
10 ms. NeMo normalises these values (`normalize: per_feature`) before its encoder; here the encoder
does, with model.encoder.feature_norm=bins. Dither, which NeMo adds only in training, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from pruned_rnnt.data.audio.waveform import FloatArray, Pcm16Array, as_floats

_RATE = 16000
_SHIFT = 160
_WINDOW = 400
_SPECTRUM = 512
_PREEMPHASIS = 0.97
# Added to the energies before the logarithm.
_LEAST_ENERGY = 2.0**-24
# Slaney's scale is linear up to this frequency, with so many hertz per mel, then logarithmic.
_LINEAR_HERTZ = 1000.0
_HERTZ_PER_MEL = 200.0 / 3.0
_LOG_STEP = math.log(6.4) / 27.0


def nemo_frame_count(samples: int) -> int:
    """Feature frames of this many samples; 0 for less than 10 ms."""
    return samples // _SHIFT


def nemo_features(
    samples: Sequence[FloatArray | Pcm16Array],
    device: torch.device,
    num_mel_bins: int,
    frames: int = 0,
) -> tuple[Tensor, Tensor]:
    """The features of N recordings (S,), computed together on a device.

    Args:
        samples: floats within -1 .. 1, or 16-bit integers.
        num_mel_bins: F.
        frames: the least T.

    Returns:
        (N, T, F) float32 on the device, of which the frames beyond the (N,) int64 lengths, which
        are on the CPU, are undefined. There is at least one frame more than the longest recording
        has.
    """
    lengths_N = torch.tensor([nemo_frame_count(len(samples_S)) for samples_S in samples])
    longest = max(len(samples_S) for samples_S in samples)
    waves_NS = torch.zeros(len(samples), max(longest, (frames - 1) * _SHIFT))
    for row_S, samples_S in zip(waves_NS, samples, strict=True):
        own_S = row_S[: len(samples_S)]
        own_S.copy_(torch.from_numpy(as_floats(samples_S)))
        own_S[1:] -= _PREEMPHASIS * own_S[:-1].clone()
    window_S, filters_FB = nemo_constants(device, num_mel_bins)
    spectrum_NBT = torch.stft(
        waves_NS.to(device),
        _SPECTRUM,
        _SHIFT,
        _WINDOW,
        window_S,
        pad_mode="constant",
        return_complex=True,
    )
    power_NBT = torch.view_as_real(spectrum_NBT).square().sum(-1)
    energies_NFT = filters_FB @ power_NBT
    return (energies_NFT + _LEAST_ENERGY).log().transpose(1, 2), lengths_N


@cache
def nemo_constants(device: torch.device, num_mel_bins: int) -> tuple[Tensor, Tensor]:
    """The window and the mel filters (F, B)."""
    window_S = torch.hann_window(_WINDOW, periodic=False, device=device)
    return window_S, mel_filters(num_mel_bins).float().to(device)


def mel_filters(num_mel_bins: int) -> Tensor:
    """(F, B) float64: triangles of equal area between equidistant points of Slaney's mel scale."""
    highest = _mels(_RATE / 2)
    edges = [_hertz(highest * i / (num_mel_bins + 1)) for i in range(num_mel_bins + 2)]
    edges_F = torch.tensor(edges, dtype=torch.float64)
    bins_B = torch.arange(_SPECTRUM // 2 + 1, dtype=torch.float64) * (_RATE / _SPECTRUM)
    widths_F = edges_F.diff()
    rising_FB = (bins_B - edges_F[:-2, None]) / widths_F[:-1, None]
    falling_FB = (edges_F[2:, None] - bins_B) / widths_F[1:, None]
    triangles_FB = torch.minimum(rising_FB, falling_FB).clamp(min=0)
    return triangles_FB * (2.0 / (edges_F[2:] - edges_F[:-2]))[:, None]


def _mels(hertz: float) -> float:
    if hertz < _LINEAR_HERTZ:
        return hertz / _HERTZ_PER_MEL
    return _LINEAR_HERTZ / _HERTZ_PER_MEL + math.log(hertz / _LINEAR_HERTZ) / _LOG_STEP


def _hertz(mels: float) -> float:
    linear = _LINEAR_HERTZ / _HERTZ_PER_MEL
    if mels < linear:
        return mels * _HERTZ_PER_MEL
    return _LINEAR_HERTZ * math.exp(_LOG_STEP * (mels - linear))
