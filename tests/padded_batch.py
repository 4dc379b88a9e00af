"""Batches from the rows of their utterances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pruned_rnnt.data.input.batch import Batch, pad_features, pad_targets

# Of padding, below the log-mel energies of speech.
_PADDING = -20.0


def padded_batch(
    features: Sequence[Tensor], targets: Sequence[Sequence[int]], **others: Any
) -> Batch:
    """The batch of features (T, F) and symbols of each utterance; others: its other fields."""
    features_NTF, feature_lengths_N = pad_features(features, _PADDING)
    targets_NU, target_lengths_N = pad_targets(targets)
    return Batch(
        features_NTF=features_NTF,
        feature_lengths_N=feature_lengths_N,
        targets_NU=targets_NU,
        target_lengths_N=target_lengths_N,
        **others,
    )
