"""The features: 80 log-mel energies per 10 ms of audio at 16 kHz."""

from __future__ import annotations

from lhotse import Fbank, FbankConfig

SAMPLING_RATE = 16000
FEATURE_DIM = 80


def fbank_extractor() -> Fbank:
    """The feature extractor: lhotse's Fbank defaults with 80 mel bins at 16 kHz, as in icefall."""
    return Fbank(FbankConfig(sampling_rate=SAMPLING_RATE, num_mel_bins=FEATURE_DIM))
