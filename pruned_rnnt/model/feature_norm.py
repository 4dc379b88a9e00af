"""Centre log-mel energies before the first layer of an encoder.

Axes: N batch, T frames, F mel bins.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Typical log-mel energy of speech; unlike a mean over the utterance, it also works for streams.
_LOG_MEL_MEAN = -7.0


def check_feature_norm(kind: str, causal: bool) -> None:
    """Raise ValueError if the kind needs whole utterances and the encoder is causal."""
    if causal and kind == "utterance":
        raise ValueError(
            "model.encoder.feature_norm is 'utterance', which needs the whole utterance, and "
            "model.encoder.causal is true: add model.encoder.feature_norm=fixed"
        )


def centre_features(features_NTF: Tensor, lengths: Tensor, kind: str) -> Tensor:
    """(N, T, F) about zero.

    Args:
        lengths: (N,) valid frames, on any device; used only if kind is `utterance`.
        kind: `none` returns the features; `fixed` subtracts a constant; `utterance` subtracts each
            bin's mean over the valid frames, which removes level and channel.
    """
    if kind == "none":
        return features_NTF
    if kind == "fixed":
        return features_NTF - _LOG_MEL_MEAN
    frames = torch.arange(features_NTF.size(1), device=features_NTF.device)
    lengths = lengths.to(features_NTF.device)
    valid_NT1 = (frames[None, :] < lengths[:, None]).unsqueeze(-1)
    total_N1F = features_NTF.masked_fill(~valid_NT1, 0.0).sum(dim=1, keepdim=True)
    return features_NTF - total_N1F / lengths.clamp(min=1)[:, None, None]
