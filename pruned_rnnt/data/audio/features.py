"""The one kind of feature: 80 log-mel energies each 10 ms of 16 kHz sound."""

from __future__ import annotations

from lhotse import Fbank, FbankConfig

SAMPLING_RATE = 16000
FEATURE_DIM = 80


def fbank_extractor() -> Fbank:
    """The one feature extractor: lhotse's Fbank defaults at 16 kHz, 80 mel bins (as icefall's)."""
    return Fbank(FbankConfig(sampling_rate=SAMPLING_RATE, num_mel_bins=FEATURE_DIM))
