"""Loads audio files as the models need them: one channel at 16 kHz.

Axes: S samples.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from pruned_rnnt.data.audio.audio_file import open_audio
from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.data.audio.waveform import FloatArray, resample

logger = logging.getLogger(__name__)

# Samples to read at a time.
_BLOCK = 2**20


def read_audio(path: Path | str) -> FloatArray:
    """Reads a whole file: (S,) float32 at 16 kHz, channels averaged.

    A file that ends before its header says is logged as a warning.

    Raises:
        FileNotFoundError, ValueError: as `open_audio`; ValueError also for an empty file and for
            samples that are not finite.
    """
    with open_audio(path) as file:
        parts = [mono(block_SC, path) for block_SC in file.blocks(_BLOCK)]
        rate, truncation = file.sampling_rate, file.truncation()
    if truncation:
        logger.warning("%s is truncated: %s", path, truncation)
    if not parts:
        raise ValueError(f"{path} has no samples")
    return resample(np.concatenate(parts), rate, SAMPLING_RATE)


def mono(samples_SC: FloatArray, path: Path | str) -> FloatArray:
    """(S, C) -> (S,), channels averaged; ValueError naming the file if samples are not finite."""
    # The mean of one channel takes as long as decoding.
    is_mono = samples_SC.shape[1] == 1
    samples_S: FloatArray = samples_SC[:, 0] if is_mono else samples_SC.mean(axis=1)
    if not np.isfinite(samples_S).all():
        raise ValueError(f"{path} has NaN or infinite samples")
    return samples_S
