"""The encoders there are, by the name that `model.encoder.kind` has in configuration files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pruned_rnnt.model.conformer import Conformer, ConformerConfig
from pruned_rnnt.model.conformer_streaming import StreamingConformer
from pruned_rnnt.model.encoder import Encoder, EncoderConfig, StreamingEncoder
from pruned_rnnt.model.zipformer.config import ZipformerConfig
from pruned_rnnt.model.zipformer.streaming_encoder import StreamingZipformer
from pruned_rnnt.model.zipformer.zipformer import Zipformer


class _Parts(NamedTuple):
    config: type[EncoderConfig]
    module: Callable[[Any], Encoder]
    stream: Callable[[Any, int, int], StreamingEncoder]


_ENCODERS = {
    "conformer": _Parts(ConformerConfig, Conformer, StreamingConformer),
    "zipformer": _Parts(ZipformerConfig, Zipformer, StreamingZipformer),
}
ENCODER_CONFIGS = {kind: parts.config for kind, parts in _ENCODERS.items()}


def build_encoder(config: EncoderConfig) -> Encoder:
    """The encoder of a configuration, with random parameters."""
    return _ENCODERS[config.kind].module(config)


def stream_encoder(encoder: Encoder, chunk: int, left: int) -> StreamingEncoder:
    """A causal encoder, its modules shared, which hears streams.

    Args:
        chunk: encoder frames of a chunk.
        left: encoder frames before the chunk that are seen.

    Raises:
        ValueError: an encoder which is not causal, or sizes which do not suit it.
    """
    return _ENCODERS[encoder.config.kind].stream(encoder, chunk, left)
