"""The features that a model was trained on, by their name in `model.encoder.features`.

An encoder that reads samples has rows of 160 samples at 16 kHz as its features. There are as many
rows as log-mel frames, so that lengths, times and batches are alike for both.

Axes: N recordings, S samples, T feature frames (10 ms), F mel bins, R samples of a frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from pruned_rnnt.data.audio.features import (
    FEATURE_DIM,
    FRAME_SAMPLES,
    audio_features,
    batch_features,
    frame_count,
)
from pruned_rnnt.data.audio.nemo_features import nemo_features
from pruned_rnnt.data.audio.waveform import FloatArray, Pcm16Array

_LOG_EPSILON = math.log(1e-10)  # as in lhotse


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


FeatureName = Literal["fbank", "nemo", "samples"]


class ReadsFeatures(Protocol):
    """The settings of an encoder that name its features."""

    @property
    def features(self) -> FeatureName: ...
    @property
    def num_mel_bins(self) -> int: ...


class FeatureKind(NamedTuple):
    """How features are computed from samples at 16 kHz.

    name: `fbank` are those of `pruned-rnnt prepare`, `nemo` those of NeMo's models, `samples` rows
        of 160 samples.
    num_mel_bins: F. Those of `fbank` that are computed here are 80.
    """

    name: FeatureName = "fbank"
    num_mel_bins: int = FEATURE_DIM

    @classmethod
    def of_encoder(cls, settings: ReadsFeatures) -> FeatureKind:
        """The features that an encoder reads."""
        return cls(settings.features, settings.num_mel_bins)

    @property
    def needs_samples(self) -> bool:
        """Whether they are never stored, nor computed from features of `fbank`."""
        return self.name != "fbank"

    @property
    def padding(self) -> float:
        """What follows shorter recordings in batches of training: a tiny log energy, or silence."""
        return 0.0 if self.name == "samples" else _LOG_EPSILON

    @property
    def frames_before(self) -> int:
        """Frames before a frame whose samples it may need."""
        return 2 if self.name == "nemo" else 1

    def of_recording(self, samples_S: FloatArray) -> Tensor:
        """The features (T, F) of a recording on the CPU; T may be 0."""
        if self.name == "fbank":
            return audio_features(samples_S)
        if self.name == "samples":
            return sample_rows(samples_S)
        features_NTF, lengths_N = self.of_recordings([samples_S], torch.device("cpu"))
        return features_NTF[0, : int(lengths_N[0])]

    def of_recordings(
        self, samples: Sequence[FloatArray | Pcm16Array], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """The features (N, T, F) of others than `fbank` on the device, zeros beyond (N,) lengths.

        The lengths are int64 and on the CPU.
        """
        if self.name == "samples":
            rows = [sample_rows(each) for each in samples]
            lengths_N = torch.tensor([len(each) for each in rows])
            return nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device), lengths_N
        features_NTF, lengths_N = nemo_features(samples, device, self.num_mel_bins)
        features_NTF = features_NTF[:, : max(1, int(lengths_N.max()))]
        frames_T = torch.arange(features_NTF.size(1), device=device)
        beyond_NT = frames_T >= lengths_N.to(device)[:, None]
        return features_NTF.masked_fill(beyond_NT[:, :, None], 0.0), lengths_N

    def of_windows(
        self, windows: Sequence[FloatArray], device: torch.device, before: int, frames: int
    ) -> Tensor:
        """The features (N, T, F) of parts of streams, in T = `frames` frames, on the device.

        Args:
            windows: the samples (S,) of `before` frames, of which at least `frames_before` are
                needed, and of the frames themselves. Frames beyond the end of one are undefined.

        Raises:
            ValueError: for `samples`, which are not computed in windows.
        """
        if self.name == "samples":
            raise ValueError("features are samples, needs fbank or nemo")
        if self.name == "fbank":
            features_NTF, _ = batch_features(windows, device, before + frames)
        else:
            features_NTF, _ = nemo_features(windows, device, self.num_mel_bins, before + frames)
        return features_NTF[:, before : before + frames]

    def energies(self, features_TF: Tensor) -> Tensor:
        """(T, F) energies of mel bins: the features themselves, but those of `samples`."""
        return log_mel_of_rows(features_TF) if self.name == "samples" else features_TF


# Of models that were not imported.
FBANK = FeatureKind()
