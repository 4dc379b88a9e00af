"""Seconds of feature frames and of encoder frames."""

from __future__ import annotations

from pruned_rnnt.model.encoder import Encoder
from pruned_rnnt.model.subsampling import SUBSAMPLING_FACTOR

FEATURE_SECONDS = 0.01
# Of most encoders; `frame_seconds` has that of any.
FRAME_SECONDS = FEATURE_SECONDS * SUBSAMPLING_FACTOR


def frame_seconds(encoder: Encoder) -> float:
    """Seconds of a frame of the encoder: 0.04, or 0.08 of a FastConformer."""
    return FEATURE_SECONDS * encoder.subsampling_factor
