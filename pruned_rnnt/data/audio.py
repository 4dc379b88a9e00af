"""Audio files of any rate to what the models hear: one channel at 16 kHz, and its features.

Axes: S samples, T feature frames, F mel bins.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pruned_rnnt.data.features import SAMPLING_RATE, fbank_extractor
from pruned_rnnt.data.waveform import resample

if TYPE_CHECKING:
    import soundfile

FloatArray = npt.NDArray[np.float32]
# The extractor cannot make a frame of fewer samples: 15 ms.
_SHORTEST = 240


@contextmanager
def open_audio(path: Path | str) -> Iterator[soundfile.SoundFile]:
    """An open wav, flac, ogg, opus or mp3 file, `soundfile.SoundFile`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an audio file, or, also while it is read, a broken one.
    """
    import soundfile

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"audio file not found: {path}")
    try:
        with soundfile.SoundFile(path) as file:
            yield file
    except soundfile.LibsndfileError as error:
        raise ValueError(f"{path} cannot be read as audio: {error.error_string}") from error


def read_audio(path: Path | str) -> FloatArray:
    """Samples of a whole file: (S,) float32 at 16 kHz, channels averaged.

    Raises:
        FileNotFoundError, ValueError: as `open_audio`; also for no samples, and for NaN.
    """
    with open_audio(path) as file:
        samples_SC, rate = file.read(dtype="float32", always_2d=True), file.samplerate
    if len(samples_SC) == 0:
        raise ValueError(f"{path} has no samples")
    return resample(mono(samples_SC, path), rate, SAMPLING_RATE)


def mono(samples_SC: FloatArray, path: Path | str) -> FloatArray:
    """(S, C) -> (S,), channels averaged; ValueError naming the file for NaN and infinity."""
    samples_S: FloatArray = samples_SC.mean(axis=1)
    if not np.isfinite(samples_S).all():
        raise ValueError(f"{path} has NaN or infinite samples")
    return samples_S


def audio_features(samples_S: FloatArray) -> Tensor:
    """(T, F) float32 log-mel energies, as in training; at least one frame."""
    samples_S = np.pad(samples_S, (0, max(0, _SHORTEST - len(samples_S))))
    return torch.from_numpy(fbank_extractor().extract(samples_S, SAMPLING_RATE))
