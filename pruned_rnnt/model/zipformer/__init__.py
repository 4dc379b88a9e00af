"""Zipformer: an encoder whose stacks of layers run at different frame rates."""

from pruned_rnnt.model.zipformer.config import (
    LARGE,
    MEDIUM,
    SIZES,
    SMALL,
    ZipformerConfig,
    zipformer_config,
)
from pruned_rnnt.model.zipformer.layer import LayerState
from pruned_rnnt.model.zipformer.zipformer import (
    StreamingZipformer,
    Zipformer,
    ZipformerState,
    subsampled_length,
)

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
