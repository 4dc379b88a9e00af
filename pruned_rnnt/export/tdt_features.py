"""The features that sherpa-onnx computes for TDT models, and their conversion to ours.

Axes: N batch, T feature frames, F mel bins, W bins of the spectrum.

sherpa-onnx runs TDT models as those of NeMo, for which it computes log-mel energies of Slaney's
filters (those of librosa: linear below 1 kHz, of equal area) from 0 Hz on, without removing the
mean of a frame. Models of this package are trained on those of Kaldi's filters. Window, frame
shift, pre-emphasis and floor are the same, so that both are sums over one power spectrum, and the
energies of Kaldi's filters are nearly a linear function of those of Slaney's. Energies below the
floor are lost. Slaney's energies reach it earlier, because filters of equal area make them smaller.

Features that it normalises, those of NeMo's own models, have no floor from version 2.0 on: it adds
2^-24 to the energies, as NeMo does. For CTC models and streams, the window and the highest filter
are those of NeMo, too.
"""

from __future__ import annotations

import math
from importlib.metadata import version

import numpy as np
import torch
from lhotse.features.kaldi.layers import Wav2LogFilterBank, Wav2Spec
from torch import Tensor, nn

from pruned_rnnt.data.audio.features import FEATURE_DIM, SAMPLING_RATE
from pruned_rnnt.data.audio.waveform import FloatArray

_FFT_LENGTH = 512
_FLOOR = torch.finfo(torch.float32).eps
_GUARD = 2.0**-24
_HIGH_HERTZ = SAMPLING_RATE / 2 - 400
# Slaney's scale: 15 mel for the first kilohertz, above it 27 mel for each factor of 6.4.
_LINEAR_HERTZ, _LINEAR_MEL = 1000.0, 15.0
_MEL_PER_LOG = 27.0 / math.log(6.4)


class KaldiFeatures(nn.Module):
    """(N, F, T) log-energies of Slaney's filters -> those of Kaldi's (N, T, F), as models are
    trained on."""

    matrix_FF: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix_FF", torch.from_numpy(_conversion()).float())

    def forward(self, features_NFT: Tensor) -> Tensor:
        # Energies at the floor of Slaney's features are treated as silence: the floor of Kaldi's.
        energies_NFT = (features_NFT.exp() - _FLOOR).clamp(min=0.0)
        # Not a matrix product, which int8 files would round.
        energies_NFT = nn.functional.conv1d(energies_NFT, self.matrix_FF.T[:, :, None])
        return energies_NFT.clamp(min=_FLOOR).log().transpose(1, 2)


def sherpa_features(
    samples_S: FloatArray,
    num_mel_bins: int = FEATURE_DIM,
    *,
    as_nemo: bool = False,
    has_floor: bool = True,
) -> Tensor:
    """(T, F) features of samples at 16 kHz, as sherpa-onnx computes them; not normalised.

    Args:
        as_nemo: those of CTC models and streams: Hann's window, and filters up to 8 kHz.
        has_floor: see `has_floor`; else 2^-24 is added to the energies.
    """
    high_hertz = SAMPLING_RATE / 2 if as_nemo else _HIGH_HERTZ
    layer = Wav2Spec(remove_dc_offset=False, use_energy=False)
    if as_nemo:
        window = layer.wav2win._window
        window.copy_(torch.hann_window(window.numel()))
    powers_NTW: Tensor = layer(torch.from_numpy(samples_S)[None])
    energies_TF = powers_NTW[0] @ torch.from_numpy(_slaney_filters(num_mel_bins, high_hertz))
    return (energies_TF.clamp(min=_FLOOR) if has_floor else energies_TF + _GUARD).log()


def has_floor(*, is_normalised: bool) -> bool:
    """Whether the installed sherpa-onnx gives low energies a floor.

    Args:
        is_normalised: the file's metadata have `normalize_type=per_feature`.
    """
    return not is_normalised or int(version("sherpa-onnx").partition(".")[0]) < 2


def _conversion() -> np.ndarray:
    """(F, F) from Slaney's energies to Kaldi's: least squares without negative weights, which
    would amplify noise."""
    from scipy.optimize import nnls

    slaney_WF = _slaney_filters(FEATURE_DIM)
    kaldi_WF = Wav2LogFilterBank(num_filters=FEATURE_DIM)._fb.numpy()
    return np.stack([nnls(slaney_WF, column)[0] for column in kaldi_WF.T], axis=1)


def _slaney_filters(num_mel_bins: int, high_hertz: float = _HIGH_HERTZ) -> np.ndarray:
    """(W, F) triangles of equal area, equally spaced on Slaney's scale."""
    borders = _hertz(np.linspace(0.0, _mel(high_hertz), num_mel_bins + 2))
    left_F, centre_F, right_F = borders[:-2], borders[1:-1], borders[2:]
    hertz_W1 = np.linspace(0.0, SAMPLING_RATE / 2, _FFT_LENGTH // 2 + 1)[:, None]
    rising_WF = (hertz_W1 - left_F) / (centre_F - left_F)
    falling_WF = (right_F - hertz_W1) / (right_F - centre_F)
    triangles_WF = np.minimum(rising_WF, falling_WF).clip(min=0.0)
    filters_WF: np.ndarray = (triangles_WF * 2 / (right_F - left_F)).astype(np.float32)
    return filters_WF


def _mel(hertz: float) -> float:
    return _LINEAR_MEL + _MEL_PER_LOG * math.log(hertz / _LINEAR_HERTZ)


def _hertz(mel: np.ndarray) -> np.ndarray:
    above = _LINEAR_HERTZ * np.exp((mel - _LINEAR_MEL) / _MEL_PER_LOG)
    hertz: np.ndarray = np.where(mel < _LINEAR_MEL, mel * _LINEAR_HERTZ / _LINEAR_MEL, above)
    return hertz
