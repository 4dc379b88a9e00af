"""Samples as feature frames: rows of 160 samples at 16 kHz, for encoders that read samples.

There are as many rows as log-mel frames, so that lengths, times and batches are alike for both.

Axes: N batch, S samples, T feature frames, R samples of a frame.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pruned_rnnt.data.audio.features import (
    FEATURE_DIM,
    SAMPLING_RATE,
    audio_features,
    frame_count,
)
from pruned_rnnt.data.audio.waveform import FloatArray, Pcm16Array

SAMPLES_PER_FRAME = SAMPLING_RATE // 100


def sample_rows(samples_S: FloatArray | Pcm16Array) -> Tensor:
    """(T, R) float32 in [-1, 1]: at the end, at most 80 samples are left out or zeros."""
    frames = frame_count(len(samples_S))
    rows_S = np.zeros(frames * SAMPLES_PER_FRAME, dtype=np.float32)
    _fill(rows_S, samples_S)
    return torch.from_numpy(rows_S).view(frames, SAMPLES_PER_FRAME)


def with_sample_rows(log_mel_NTF: Tensor, samples: Sequence[FloatArray | Pcm16Array]) -> Tensor:
    """(N, T, F + R): the samples of N recordings behind their log-mel energies.

    Zeros follow a recording, and samples beyond T frames are left out.
    """
    batch, frames = log_mel_NTF.shape[:2]
    rows_NS = np.zeros((batch, frames * SAMPLES_PER_FRAME), dtype=np.float32)
    for row_S, samples_S in zip(rows_NS, samples, strict=True):
        _fill(row_S, samples_S)
    rows_NTR = torch.from_numpy(rows_NS).view(batch, frames, SAMPLES_PER_FRAME)
    return torch.cat((log_mel_NTF, rows_NTR.to(log_mel_NTF.device)), dim=2)


def _fill(row_S: FloatArray, samples_S: FloatArray | Pcm16Array) -> None:
    """Write the samples that fit into a row of zeros."""
    kept_S = samples_S[: len(row_S)]
    row_S[: len(kept_S)] = kept_S
    if samples_S.dtype == np.int16:
        row_S *= 2**-15


def log_mel_part(features_TX: Tensor) -> Tensor:
    """(..., F) of (..., F) or (..., F + R): without the rows of `with_sample_rows`."""
    return features_TX[..., :FEATURE_DIM]


def sample_part(features_TX: Tensor) -> Tensor:
    """(..., R) of (..., F + R)."""
    return features_TX[..., FEATURE_DIM:]


def log_mel_of_rows(rows_TR: Tensor) -> Tensor:
    """(T, F) log-mel energies of the samples in (T, R), on the CPU."""
    return audio_features(rows_TR.flatten().cpu().numpy())
