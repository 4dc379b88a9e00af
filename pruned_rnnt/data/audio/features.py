"""The features that models are trained on, by their names in `model.encoder.features`.

    fbank     80 log-mel energies per 10 ms of audio at 16 kHz, those of this package
    nemo      log-mel energies of NeMo's models
    samples   rows of 160 samples at 16 kHz, for encoders that read samples; as many rows as log-mel
              frames, so that lengths, times and batches are alike for all

Axes: N recordings, S samples, T feature frames (10 ms), W samples of a window, B bins of its
spectrum, F mel bins, R samples of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from pruned_rnnt.data.audio.waveform import FloatArray, Pcm16Array, as_floats

if TYPE_CHECKING:
    from lhotse import Fbank

SAMPLING_RATE = 16000
FEATURE_DIM = 80
# The extractor needs at least 15 ms for a frame.
MIN_SAMPLES = 240
# From one frame to the next.
FRAME_SAMPLES = SAMPLING_RATE // 100
# From the start of a frame to the end of its window of 25 ms, whose centre is that of the frame;
# NeMo's ends 5 ms earlier.
WINDOW_END = FRAME_SAMPLES // 2 + SAMPLING_RATE // 80
_WINDOW = SAMPLING_RATE // 40
_SPECTRUM = 512
_PREEMPHASIS = 0.97
# Of the lowest and the highest mel filter.
LOWEST_HERTZ, HIGHEST_HERTZ = 20.0, SAMPLING_RATE / 2 - 400
_LEAST_ENERGY = torch.finfo(torch.float32).eps
# Frames that are computed at once, in about 10 KiB each.
_MOST_FRAMES = 100_000
# Samples that one thread copies, and threads for more.
_COPIED_ALONE, _COPYING_THREADS = 1 << 22, 4
_LOG_EPSILON = math.log(1e-10)  # as in lhotse
# Added to NeMo's energies before the logarithm.
_NEMO_LEAST_ENERGY = 2.0**-24
# Slaney's scale is linear up to this frequency, with so many hertz per mel, then logarithmic.
_LINEAR_HERTZ = 1000.0
_HERTZ_PER_MEL = 200.0 / 3.0
_LOG_STEP = math.log(6.4) / 27.0


def fbank_extractor() -> Fbank:
    """The feature extractor: lhotse's Fbank defaults with 80 mel bins at 16 kHz, as in icefall."""
    from lhotse import Fbank, FbankConfig

    return Fbank(FbankConfig(sampling_rate=SAMPLING_RATE, num_mel_bins=FEATURE_DIM))


def _log_mel(waves_NS: Tensor) -> Tensor:
    """(N, T, F) of float32 samples: every step is that of `fbank_extractor`.

    But the energies: lhotse squares absolute values, whose square roots take a CPU a third of the
    time. Importing lhotse takes longer than the features of ten minutes.
    """
    frames = frame_count(waves_NS.size(1))
    left = (_WINDOW - FRAME_SAMPLES) // 2
    right = (frames - 1) * FRAME_SAMPLES + _WINDOW - left - waves_NS.size(1)
    # Windows that exceed the samples see them mirrored.
    ends = waves_NS[:, :left].flip(1), waves_NS[:, -right:].flip(1)
    waves_NS = torch.cat((ends[0], waves_NS, ends[1]), dim=1)
    windows_NTW = waves_NS.unfold(1, _WINDOW, FRAME_SAMPLES)
    windows_NTW = windows_NTW - windows_NTW.mean(dim=2, keepdim=True)
    before_NTW = functional.pad(windows_NTW, (1, 0), mode="replicate")[:, :, :-1]
    window_W, filters_BF = _constants(waves_NS.device)
    windows_NTW = (windows_NTW - _PREEMPHASIS * before_NTW) * window_W
    parts_NTB2 = torch.view_as_real(torch.fft.rfft(windows_NTW, _SPECTRUM)).square_()
    energies_NTF = (parts_NTB2[..., 0] + parts_NTB2[..., 1]) @ filters_BF
    return energies_NTF.clamp_(min=_LEAST_ENERGY).log_()


@cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Kaldi's "povey" window, and the mel filters (B, F)."""
    with torch.inference_mode(False):  # they outlive the mode of their first user
        window_W = torch.hann_window(_WINDOW, periodic=False).pow(0.85)
        return window_W.to(device), _mel_filters().to(device)


def _mel_filters() -> Tensor:
    """(B, F) float32: triangles between equidistant points of the mel scale.

    Rounded like those of lhotse: float32, and numpy's logarithm.
    """
    lowest, highest = kaldi_mels(np.float64(LOWEST_HERTZ)), kaldi_mels(np.float64(HIGHEST_HERTZ))
    step = (highest - lowest) / (FEATURE_DIM + 1)
    edges_F = float(lowest) + torch.arange(FEATURE_DIM + 2) * float(step)
    hertz_B = np.arange(_SPECTRUM // 2, dtype=np.float32) * np.float32(SAMPLING_RATE / _SPECTRUM)
    mels_B = torch.from_numpy(kaldi_mels(hertz_B))
    left_F1, centre_F1, right_F1 = edges_F[:-2, None], edges_F[1:-1, None], edges_F[2:, None]
    rising_FB = (mels_B - left_F1) / (centre_F1 - left_F1)
    falling_FB = (right_F1 - mels_B) / (right_F1 - centre_F1)
    # The highest bin is beyond the highest filter. Products round by the order in memory.
    return functional.pad(torch.minimum(rising_FB, falling_FB).clamp(min=0), (0, 1)).T


def kaldi_mels(hertz: Any) -> Any:
    """Frequencies on Kaldi's mel scale."""
    return 1127.0 * np.log(1 + hertz / 700)


def frame_count(samples: int) -> int:
    """Feature frames of this many samples."""
    return (max(samples, MIN_SAMPLES) + FRAME_SAMPLES // 2) // FRAME_SAMPLES


def most_samples(frames: int) -> int:
    """The most samples of which `frame_count` is at most `frames`."""
    return (frames + 1) * FRAME_SAMPLES - FRAME_SAMPLES // 2 - 1


def audio_features(samples_S: FloatArray) -> Tensor:
    """(T, F) float32 log-mel energies, as in training; at least one frame."""
    samples_S = np.pad(samples_S, (0, max(0, MIN_SAMPLES - len(samples_S))))
    return _log_mel(torch.from_numpy(samples_S)[None])[0]


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
        _log_mel(part_NS.float().mul_(2**-15) if part_NS.dtype == torch.int16 else part_NS)
        for part_NS in waves_NS.split(rows)
    ]
    features_NTF = features[0] if len(features) == 1 else torch.cat(features)
    return features_NTF[:, :frames], lengths_N


def _padded(samples: Sequence[FloatArray | Pcm16Array], size: int, *, pinned: bool) -> Tensor:
    """Recordings (S,) as rows (N, size): integers if all are, which halves the bytes to transfer.

    Windows that exceed a recording see it mirrored, as `_log_mel` does at the end of a row.
    """
    are_integers = all(samples_S.dtype == np.int16 for samples_S in samples)
    dtype = torch.int16 if are_integers else torch.float32
    padded_NS = torch.empty((len(samples), size), dtype=dtype, pin_memory=pinned)

    def fill(row_S: npt.NDArray[Any], samples_S: FloatArray | Pcm16Array) -> None:
        count = max(len(samples_S), MIN_SAMPLES)
        row_S[: len(samples_S)] = samples_S
        row_S[len(samples_S) :] = 0
        if samples_S.dtype == np.int16 and not are_integers:
            row_S[: len(samples_S)] *= 2**-15
        end = frame_count(count) * FRAME_SAMPLES + (_WINDOW - FRAME_SAMPLES) // 2
        row_S[count:end] = row_S[count - max(0, end - count) : count][::-1]

    rows_NS = padded_NS.numpy()
    if padded_NS.numel() < _COPIED_ALONE:
        for row_S, samples_S in zip(rows_NS, samples, strict=True):
            fill(row_S, samples_S)
    else:
        # Copies run outside of Python's lock, so that the GPU's next work is launched earlier.
        with ThreadPoolExecutor(_COPYING_THREADS) as pool:
            list(pool.map(fill, rows_NS, samples))
    return padded_NS


def nemo_frame_count(samples: int) -> int:
    """Frames of `nemo_features` of this many samples; 0 for less than 10 ms."""
    return samples // FRAME_SAMPLES


def nemo_features(
    samples: Sequence[FloatArray | Pcm16Array],
    device: torch.device,
    num_mel_bins: int,
    frames: int = 0,
) -> tuple[Tensor, Tensor]:
    """NeMo's log-mel energies of N recordings (S,), without normalisation, computed on a device.

    Beside the features of this package: pre-emphasis of the whole signal, a Hann window, Slaney's
    mel scale with filters of equal area, and frames whose centre is at a multiple of 10 ms. NeMo
    normalises these values (`normalize: per_feature`) before its encoder; here the encoder does,
    with model.encoder.feature_norm=bins. Dither, which NeMo adds only in training, is left out.

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
    waves_NS = torch.zeros(len(samples), max(longest, (frames - 1) * FRAME_SAMPLES))
    for row_S, samples_S in zip(waves_NS, samples, strict=True):
        own_S = row_S[: len(samples_S)]
        own_S.copy_(torch.from_numpy(as_floats(samples_S)))
        own_S[1:] -= _PREEMPHASIS * own_S[:-1].clone()
    window_S, filters_FB = nemo_constants(device, num_mel_bins)
    spectrum_NBT = torch.stft(
        waves_NS.to(device),
        _SPECTRUM,
        FRAME_SAMPLES,
        _WINDOW,
        window_S,
        pad_mode="constant",
        return_complex=True,
    )
    power_NBT = torch.view_as_real(spectrum_NBT).square().sum(-1)
    energies_NFT = filters_FB @ power_NBT
    return (energies_NFT + _NEMO_LEAST_ENERGY).log().transpose(1, 2), lengths_N


@cache
def nemo_constants(device: torch.device, num_mel_bins: int) -> tuple[Tensor, Tensor]:
    """The window and the mel filters (F, B) of `nemo_features`."""
    with torch.inference_mode(False):  # they outlive the mode of their first user
        window_S = torch.hann_window(_WINDOW, periodic=False, device=device)
        return window_S, _slaney_filters(num_mel_bins).float().to(device)


def _slaney_filters(num_mel_bins: int) -> Tensor:
    """(F, B) float64: triangles of equal area between equidistant points of Slaney's mel scale."""
    highest = _slaney_mels(SAMPLING_RATE / 2)
    edges = [_slaney_hertz(highest * i / (num_mel_bins + 1)) for i in range(num_mel_bins + 2)]
    edges_F = torch.tensor(edges, dtype=torch.float64)
    bins_B = torch.arange(_SPECTRUM // 2 + 1, dtype=torch.float64) * (SAMPLING_RATE / _SPECTRUM)
    widths_F = edges_F.diff()
    rising_FB = (bins_B - edges_F[:-2, None]) / widths_F[:-1, None]
    falling_FB = (edges_F[2:, None] - bins_B) / widths_F[1:, None]
    triangles_FB = torch.minimum(rising_FB, falling_FB).clamp(min=0)
    return triangles_FB * (2.0 / (edges_F[2:] - edges_F[:-2]))[:, None]


def _slaney_mels(hertz: float) -> float:
    if hertz < _LINEAR_HERTZ:
        return hertz / _HERTZ_PER_MEL
    return _LINEAR_HERTZ / _HERTZ_PER_MEL + math.log(hertz / _LINEAR_HERTZ) / _LOG_STEP


def _slaney_hertz(mels: float) -> float:
    linear = _LINEAR_HERTZ / _HERTZ_PER_MEL
    if mels < linear:
        return mels * _HERTZ_PER_MEL
    return _LINEAR_HERTZ * math.exp(_LOG_STEP * (mels - linear))


def sample_rows(samples_S: FloatArray | Pcm16Array) -> Tensor:
    """(T, R) float32 in [-1, 1]: at the end, at most 80 samples are left out or zeros."""
    frames = frame_count(len(samples_S))
    rows_S = np.zeros(frames * FRAME_SAMPLES, dtype=np.float32)
    kept_S = samples_S[: len(rows_S)]
    rows_S[: len(kept_S)] = kept_S
    if samples_S.dtype == np.int16:
        rows_S *= 2**-15
    return torch.from_numpy(rows_S).view(frames, FRAME_SAMPLES)


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
        """(T, F) energies of mel bins: the features themselves; those of `samples` on the CPU."""
        if self.name == "samples":
            return audio_features(features_TF.flatten().cpu().numpy())
        return features_TF


# Of models that were not imported.
FBANK = FeatureKind()
