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
from pruned_rnnt.model.zipformer.icefall_import import (
    IcefallImport,
    IcefallSizes,
    icefall_sizes,
    import_icefall,
    read_icefall,
)
from pruned_rnnt.model.zipformer.state import LayerState, ZipformerState
from pruned_rnnt.model.zipformer.streaming import StreamingZipformer

__all__ = [
    "LARGE",
    "MEDIUM",
    "SIZES",
    "SMALL",
    "IcefallImport",
    "IcefallSizes",
    "LayerState",
    "StreamingZipformer",
    "Zipformer",
    "ZipformerConfig",
    "ZipformerState",
    "icefall_sizes",
    "import_icefall",
    "read_icefall",
    "subsampled_length",
    "zipformer_config",
]
