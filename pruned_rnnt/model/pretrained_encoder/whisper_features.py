"""Whisper's log-mel energies, computed on the device of the samples.

Axes: N batch, S samples, T feature frames, F mel bins, B bins of the spectrum.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from pruned_rnnt.model.pretrained_encoder.config import SAMPLES_PER_FRAME, SAMPLING_RATE

_SPECTRUM = 400
_LEAST_ENERGY = 1e-10
# Energies further below the loudest one of the utterance, in powers of 10, are raised to this.
_RANGE = 8.0


def whisper_features(samples_NS: Tensor, frames_N: Tensor, num_mel_bins: int) -> Tensor:
    """The features of N utterances, equal to those of transformers' WhisperFeatureExtractor.

    The extractor gets each utterance padded with silence to its window of 30 s; these are the
    frames up to the end of the utterance.

    Args:
        samples_NS: float32, zeros beyond the utterances; S = 160 T >= 320.
        frames_N: frames of each utterance, on the same device.

    Returns:
        (N, F, T) float32, zeros beyond the lengths.
    """
    edge = _SPECTRUM // 2
    begin_NS = samples_NS[:, 1 : edge + 1].flip(1)
    padded_NS = torch.cat((begin_NS, nn.functional.pad(samples_NS, (0, edge))), dim=1)
    window_S, filters_FB = _constants(samples_NS.device, num_mel_bins)
    spectrum_NBT = torch.stft(
        padded_NS,
        _SPECTRUM,
        SAMPLES_PER_FRAME,
        window=window_S,
        center=False,
        return_complex=True,
    )[..., : samples_NS.size(1) // SAMPLES_PER_FRAME]
    energies_NFT = filters_FB @ torch.view_as_real(spectrum_NBT).square().sum(-1)
    logs_NFT = energies_NFT.clamp(min=_LEAST_ENERGY).log10()
    frames_T = torch.arange(logs_NFT.size(2), device=logs_NFT.device)
    beyond_N1T = (frames_T >= frames_N[:, None])[:, None]
    loudest_N11 = logs_NFT.masked_fill(beyond_N1T, -torch.inf).amax((1, 2), keepdim=True)
    logs_NFT = torch.maximum(logs_NFT, loudest_N11 - _RANGE)
    return ((logs_NFT + 4.0) / 4.0).masked_fill(beyond_N1T, 0.0)


@cache
def _constants(device: torch.device, num_mel_bins: int) -> tuple[Tensor, Tensor]:
    """The window and the mel filters (F, B)."""
    from transformers.audio_utils import mel_filter_bank

    filters_BF = mel_filter_bank(
        num_frequency_bins=_SPECTRUM // 2 + 1,
        num_mel_filters=num_mel_bins,
        min_frequency=0.0,
        max_frequency=SAMPLING_RATE / 2,
        sampling_rate=SAMPLING_RATE,
        norm="slaney",
        mel_scale="slaney",
    )
    filters_FB = torch.from_numpy(np.ascontiguousarray(filters_BF.T, dtype=np.float32))
    with torch.inference_mode(False):  # the tensors outlive the mode of their first user
        return torch.hann_window(_SPECTRUM, device=device), filters_FB.to(device)
