"""What is subtracted from log-mel energies before an encoder's first layer.

Axes: N batch, T frames, F mel bins.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Log-mel energies of speech lie about here; a fixed shift keeps streaming possible.
_LOG_MEL_MEAN = -7.0


def check_feature_norm(kind: str, causal: bool) -> None:
    """Raises ValueError for a kind which a causal encoder cannot have."""
    if causal and kind == "utterance":
        raise ValueError(
            "model.encoder.feature_norm is 'utterance', which needs the whole utterance; "
            "a causal encoder needs 'fixed'"
        )


def centre_features(features_NTF: Tensor, lengths: Tensor, kind: str) -> Tensor:
    """(N, T, F) about zero.

    Args:
        lengths: (N,) real frames, on any device; only looked at where the kind needs them.
        kind: `none` leaves the features as they are; `fixed` subtracts a constant; `utterance` each
            bin's mean over the utterance's own frames, which removes level and channel.
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
