"""Zipformer: an encoder whose stacks of layers run at different frame rates."""

from pruned_rnnt.model.zipformer.config import (
    LARGE,
    MEDIUM,
    SIZES,
    SMALL,
    ZipformerConfig,
    zipformer_config,
)
from pruned_rnnt.model.zipformer.state import LayerState, ZipformerState
from pruned_rnnt.model.zipformer.streaming_encoder import StreamingZipformer
from pruned_rnnt.model.zipformer.zipformer import Zipformer, subsampled_length

__all__ = [
    "LARGE",
    "MEDIUM",
    "SIZES",
    "SMALL",
    "LayerState",
    "StreamingZipformer",
    "Zipformer",
    "ZipformerConfig",
    "ZipformerState",
    "subsampled_length",
    "zipformer_config",
]
