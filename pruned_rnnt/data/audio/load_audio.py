"""Loads audio files as the models need them: one channel at 16 kHz, and its features.

Axes: S samples, T feature frames, F mel bins.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pruned_rnnt.data.audio.audio_file import open_audio
from pruned_rnnt.data.audio.features import SAMPLING_RATE, fbank_extractor
from pruned_rnnt.data.audio.waveform import FloatArray, resample

# The extractor needs at least 15 ms for a frame.
_MIN_SAMPLES = 240
# Samples to read at a time.
_BLOCK = 2**20


def read_audio(path: Path | str) -> FloatArray:
    """Reads a whole file: (S,) float32 at 16 kHz, channels averaged.

    Raises:
        FileNotFoundError, ValueError: as `open_audio`; ValueError also for an empty file and for
            samples that are not finite.
    """
    with open_audio(path) as file:
        parts = [mono(block_SC, path) for block_SC in file.blocks(_BLOCK)]
        rate = file.sampling_rate
    if not parts:
        raise ValueError(f"{path} has no samples")
    return resample(np.concatenate(parts), rate, SAMPLING_RATE)


def mono(samples_SC: FloatArray, path: Path | str) -> FloatArray:
    """(S, C) -> (S,), channels averaged; ValueError naming the file if samples are not finite."""
    samples_S: FloatArray = samples_SC.mean(axis=1)
    if not np.isfinite(samples_S).all():
        raise ValueError(f"{path} has NaN or infinite samples")
    return samples_S


def audio_features(samples_S: FloatArray) -> Tensor:
    """(T, F) float32 log-mel energies, as in training; at least one frame."""
    samples_S = np.pad(samples_S, (0, max(0, _MIN_SAMPLES - len(samples_S))))
    return torch.from_numpy(fbank_extractor().extract(samples_S, SAMPLING_RATE))
