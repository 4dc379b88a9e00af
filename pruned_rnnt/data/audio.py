"""Audio files of any rate to what the models hear: one channel at 16 kHz, and its features.

Axes: S samples, T feature frames, F mel bins.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pruned_rnnt.data.features import SAMPLING_RATE, fbank_extractor
from pruned_rnnt.data.waveform import resample

FloatArray = npt.NDArray[np.float32]


def read_audio(path: Path | str) -> FloatArray:
    """Samples of a wav, flac, ogg or mp3 file: (S,) float32 at 16 kHz, channels averaged.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an audio file, or one without samples.
    """
    import soundfile

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"audio file not found: {path}")
    try:
        samples_SC, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise ValueError(f"{path} cannot be read as audio: {error.error_string}") from error
    if len(samples_SC) == 0:
        raise ValueError(f"{path} has no samples")
    return resample(samples_SC.mean(axis=1), rate, SAMPLING_RATE)


def audio_features(samples_S: FloatArray) -> Tensor:
    """(T, F) float32 log-mel energies, as in training."""
    return torch.from_numpy(fbank_extractor().extract(samples_S, SAMPLING_RATE))
