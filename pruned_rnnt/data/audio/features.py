"""The features: 80 log-mel energies per 10 ms of audio at 16 kHz.

Axes: N batch, S samples, T feature frames, F mel bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from lhotse import Fbank, FbankConfig
from torch import Tensor, nn

from pruned_rnnt.data.audio.waveform import FloatArray, Pcm16Array

SAMPLING_RATE = 16000
FEATURE_DIM = 80
# The extractor needs at least 15 ms for a frame.
MIN_SAMPLES = 240
# From one frame to the next.
FRAME_SAMPLES = SAMPLING_RATE // 100
_WINDOW = SAMPLING_RATE // 40
# Frames that are computed at once, in about 10 KiB each.
_MOST_FRAMES = 100_000


def fbank_extractor() -> Fbank:
    """The feature extractor: lhotse's Fbank defaults with 80 mel bins at 16 kHz, as in icefall."""
    return Fbank(FbankConfig(sampling_rate=SAMPLING_RATE, num_mel_bins=FEATURE_DIM))


@cache
def _layer(device: torch.device) -> nn.Module:
    """The extractor's layer on a device; making it takes as long as a second of audio."""
    with torch.inference_mode(False):  # the layer outlives the mode of its first user
        layer: nn.Module = fbank_extractor().extractor.to(device)
    layer._to_spec = _power  # type: ignore[assignment]
    return layer


def _power(spectrum_NTF: Tensor) -> Tensor:
    """The squared magnitudes of a spectrum, which is overwritten.

    lhotse squares absolute values, whose square roots take a CPU a third of the layer's time.
    """
    parts_NTF2 = torch.view_as_real(spectrum_NTF).square_()
    return parts_NTF2[..., 0] + parts_NTF2[..., 1]


def frame_count(samples: int) -> int:
    """Feature frames of this many samples."""
    return (max(samples, MIN_SAMPLES) + FRAME_SAMPLES // 2) // FRAME_SAMPLES


def most_samples(frames: int) -> int:
    """The most samples of which `frame_count` is at most `frames`."""
    return (frames + 1) * FRAME_SAMPLES - FRAME_SAMPLES // 2 - 1


def audio_features(samples_S: FloatArray) -> Tensor:
    """(T, F) float32 log-mel energies, as in training; at least one frame."""
    samples_S = np.pad(samples_S, (0, max(0, MIN_SAMPLES - len(samples_S))))
    features_NTF: Tensor = _layer(torch.device("cpu"))(torch.from_numpy(samples_S)[None])
    return features_NTF[0]


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
        _layer(device)(part_NS.float().mul_(2**-15) if part_NS.dtype == torch.int16 else part_NS)
        for part_NS in waves_NS.split(rows)
    ]
    features_NTF = features[0] if len(features) == 1 else torch.cat(features)
    return features_NTF[:, :frames], lengths_N


def _padded(samples: Sequence[FloatArray | Pcm16Array], size: int, *, pinned: bool) -> Tensor:
    """Recordings (S,) as rows (N, size): integers if all are, which halves the bytes to transfer.

    Windows that exceed a recording see it mirrored, as the layer does at the end of a row.
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
