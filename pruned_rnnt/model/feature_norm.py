"""Centre log-mel energies before the first layer of an encoder.

Axes: N batch, T frames, F mel bins.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

FeatureNorm = Literal["none", "fixed", "utterance", "speech"]

# Typical log-mel energy of speech; unlike a mean over the utterance, it also works for streams.
_LOG_MEL_MEAN = -7.0
# The weight of a frame in the mean of `speech` is proportional to this power of its energy. A pause
# 20 dB below the speech then counts a tenth as much, and digital silence next to nothing; a click
# of one frame does not outweigh a word.
_ENERGY_POWER = 0.5


def check_feature_norm(kind: str, causal: bool) -> None:
    """Raise ValueError if the kind needs whole utterances and the encoder is causal."""
    if causal and kind in ("utterance", "speech"):
        raise ValueError(
            f"model.encoder.feature_norm is {kind!r}, which needs the whole utterance, and "
            "model.encoder.causal is true: add model.encoder.feature_norm=fixed"
        )


def centre_features(features_NTF: Tensor, lengths: Tensor, kind: str) -> Tensor:
    """(N, T, F) about zero.

    Args:
        lengths: (N,) valid frames, on any device; used only if kind is `utterance` or `speech`.
        kind: `none` returns the features; `fixed` subtracts a constant; `utterance` subtracts each
            bin's mean over the valid frames, which removes level and channel; `speech` does so with
            a mean in which loud frames count most, so that silence around the speech changes
            nothing.
    """
    if kind == "none":
        return features_NTF
    if kind == "fixed":
        return features_NTF - _LOG_MEL_MEAN
    frames = torch.arange(features_NTF.size(1), device=features_NTF.device)
    lengths = lengths.to(features_NTF.device)
    valid_NT1 = (frames[None, :] < lengths[:, None]).unsqueeze(-1)
    valid_NTF = features_NTF.masked_fill(~valid_NT1, 0.0)
    if kind == "utterance":
        total_N1F = valid_NTF.sum(dim=1, keepdim=True)
        return features_NTF - total_N1F / lengths.clamp(min=1)[:, None, None]
    energy_NT1 = features_NTF.mean(dim=2, keepdim=True) * _ENERGY_POWER
    # Not -inf, because the padding of an utterance without frames must not give NaN.
    weight_NT1 = energy_NT1.masked_fill(~valid_NT1, -1e4).softmax(dim=1)
    return features_NTF - (valid_NTF * weight_NT1).sum(dim=1, keepdim=True)
