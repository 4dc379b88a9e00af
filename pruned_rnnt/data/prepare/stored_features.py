"""Computes the features of one cut and stores them in a prepared folder.

Axes: S audio samples.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pruned_rnnt.data.audio.features import SAMPLING_RATE
from pruned_rnnt.data.audio.waveform import FloatArray


def store_features(
    samples_S: FloatArray,
    extractor: Any,
    storage: Any,
    *,
    recording_id: str,
    start: float,
    duration: float,
    channel: int,
) -> Any:
    """Stores the features of a cut and returns lhotse's `Features` for its manifest.

    samples_S: float32 at 16 kHz, the samples of this cut only.
    storage: an open writer of lhotse's below DIR/features, or one that writes to memory.
    start, duration: of the cut, in seconds. The duration computed from the samples can differ by
        rounding, and lhotse requires that features cover the whole cut.
    """
    features = extractor.extract_from_samples_and_store(
        samples_S[None], storage=storage, sampling_rate=SAMPLING_RATE, offset=start
    )
    path = features.storage_path
    return replace(
        features,
        recording_id=recording_id,
        channels=channel,
        duration=duration,
        # Relative to the prepared folder, so that the folder can be moved.
        storage_path=f"features/{Path(path).name}" if path else path,
    )
