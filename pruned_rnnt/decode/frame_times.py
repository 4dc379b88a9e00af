"""Seconds of feature frames and of encoder frames."""

from __future__ import annotations

from pruned_rnnt.model.subsampling import SUBSAMPLING_FACTOR

FEATURE_SECONDS = 0.01
FRAME_SECONDS = FEATURE_SECONDS * SUBSAMPLING_FACTOR
