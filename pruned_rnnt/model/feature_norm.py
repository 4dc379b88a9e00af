"""Normalise log-mel energies before the first layer of an encoder.

Axes: N batch, T frames, F mel bins.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

FeatureNorm = Literal["none", "fixed", "utterance", "speech", "bins"]

# Typical log-mel energy of speech; unlike a mean over the utterance, it also works for streams.
_LOG_MEL_MEAN = -7.0
# The weight of a frame in the mean of `speech` is proportional to this power of its energy. A pause
# 20 dB below the speech then counts a tenth as much, and digital silence next to nothing; a click
# of one frame does not outweigh a word.
_ENERGY_POWER = 0.5
# Added to the standard deviation of a bin, as in NeMo.
_LEAST_DEVIATION = 1e-5


def check_feature_norm(kind: str, causal: bool) -> None:
    """Raise ValueError if the kind needs whole utterances and the encoder is causal."""
    if causal and kind in ("utterance", "speech", "bins"):
        raise ValueError(
            f"model.encoder.feature_norm is {kind!r}, which needs the whole utterance, and "
            "model.encoder.causal is true: add model.encoder.feature_norm=fixed"
        )


def finite_padding(features_NTF: Tensor, lengths_N: Tensor) -> Tensor:
    """(N, T, F) with zeros in place of NaN and infinities beyond the (N,) lengths.

    The gradient of padding is zero, but zero times NaN would be a gradient of NaN for the weights
    of the first layer. Without gradients, the features themselves.
    """
    if not torch.is_grad_enabled():
        return features_NTF
    frames = torch.arange(features_NTF.size(1), device=features_NTF.device)
    lengths_N = lengths_N.to(features_NTF.device, non_blocking=True)
    real_NT1 = (frames < lengths_N[:, None]).unsqueeze(-1)
    return torch.where(real_NT1 | features_NTF.isfinite(), features_NTF, 0.0)


def centre_features(features_NTF: Tensor, lengths: Tensor, kind: str) -> Tensor:
    """(N, T, F) about zero.

    Args:
        lengths: (N,) valid frames, on any device; not used if kind is `none` or `fixed`.
        kind: `none` returns the features; `fixed` subtracts a constant; `utterance` subtracts each
            bin's mean over the valid frames, which removes level and channel; `speech` does so with
            a mean in which loud frames count most, so that silence around the speech changes
            nothing; `bins` also divides by each bin's standard deviation, as NeMo's `per_feature`.
    """
    if kind == "none":
        return features_NTF
    if kind == "fixed":
        return features_NTF - _LOG_MEL_MEAN
    frames = torch.arange(features_NTF.size(1), device=features_NTF.device)
    lengths = lengths.to(features_NTF.device)
    valid_NT1 = (frames[None, :] < lengths[:, None]).unsqueeze(-1)
    valid_NTF = features_NTF.masked_fill(~valid_NT1, 0.0)
    if kind in ("utterance", "bins"):
        counts_N11 = lengths.clamp(min=1)[:, None, None]
        centred_NTF = features_NTF - valid_NTF.sum(dim=1, keepdim=True) / counts_N11
        if kind == "utterance":
            return centred_NTF
        squares_NTF = centred_NTF.square().masked_fill(~valid_NT1, 0.0)
        variance_N1F = squares_NTF.sum(dim=1, keepdim=True) / (counts_N11 - 1).clamp(min=1)
        return centred_NTF / (variance_N1F.sqrt() + _LEAST_DEVIATION)
    energy_NT1 = features_NTF.mean(dim=2, keepdim=True) * _ENERGY_POWER
    # Not -inf, because the padding of an utterance without frames must not give NaN.
    weight_NT1 = energy_NT1.masked_fill(~valid_NT1, -1e4).softmax(dim=1)
    return features_NTF - (valid_NTF * weight_NT1).sum(dim=1, keepdim=True)
