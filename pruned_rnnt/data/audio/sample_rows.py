"""Samples as feature frames: rows of 160 samples at 16 kHz, for encoders that read samples.

There are as many rows as log-mel frames, so that lengths, times and batches are alike for both.

Axes: S samples, T feature frames, R samples of a frame.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pruned_rnnt.data.audio.features import FRAME_SAMPLES, audio_features, frame_count
from pruned_rnnt.data.audio.waveform import FloatArray, Pcm16Array


def sample_rows(samples_S: FloatArray | Pcm16Array) -> Tensor:
    """(T, R) float32 in [-1, 1]: at the end, at most 80 samples are left out or zeros."""
    frames = frame_count(len(samples_S))
    rows_S = np.zeros(frames * FRAME_SAMPLES, dtype=np.float32)
    kept_S = samples_S[: len(rows_S)]
    rows_S[: len(kept_S)] = kept_S
    if samples_S.dtype == np.int16:
        rows_S *= 2**-15
    return torch.from_numpy(rows_S).view(frames, FRAME_SAMPLES)


def log_mel_of_rows(rows_TR: Tensor) -> Tensor:
    """(T, F) log-mel energies of the samples in (T, R), on the CPU."""
    return audio_features(rows_TR.flatten().cpu().numpy())
