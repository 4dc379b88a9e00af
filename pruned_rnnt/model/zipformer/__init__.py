"""Zipformer: an encoder whose stacks run at different rates."""

from pruned_rnnt.model.zipformer.config import (
    LARGE,
    MEDIUM,
    SIZES,
    SMALL,
    ZipformerConfig,
    zipformer_config,
)
from pruned_rnnt.model.zipformer.encoder import Zipformer, subsampled_length
from pruned_rnnt.model.zipformer.state import LayerState, ZipformerState

__all__ = [
    "LARGE",
    "MEDIUM",
    "SIZES",
    "SMALL",
    "LayerState",
    "Zipformer",
    "ZipformerConfig",
    "ZipformerState",
    "subsampled_length",
    "zipformer_config",
]
