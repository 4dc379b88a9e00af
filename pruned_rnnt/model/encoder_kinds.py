"""The available encoders, by their names in `model.encoder.kind` of configuration files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pruned_rnnt.model.conformer import Conformer, ConformerConfig
from pruned_rnnt.model.conformer_streaming import StreamingConformer
from pruned_rnnt.model.encoder import Encoder, EncoderConfig, StreamingEncoder
from pruned_rnnt.model.zipformer.config import ZipformerConfig
from pruned_rnnt.model.zipformer.streaming_encoder import StreamingZipformer
from pruned_rnnt.model.zipformer.zipformer import Zipformer


class _EncoderKind(NamedTuple):
    config: type[EncoderConfig]
    module: Callable[[Any], Encoder]
    stream: Callable[[Any, int, int], StreamingEncoder]


_ENCODERS = {
    "conformer": _EncoderKind(ConformerConfig, Conformer, StreamingConformer),
    "zipformer": _EncoderKind(ZipformerConfig, Zipformer, StreamingZipformer),
}
ENCODER_CONFIGS = {name: kind.config for name, kind in _ENCODERS.items()}


def build_encoder(config: EncoderConfig) -> Encoder:
    """Build the encoder of a configuration, with random parameters."""
    return _ENCODERS[config.kind].module(config)


def stream_encoder(encoder: Encoder, chunk: int, left: int) -> StreamingEncoder:
    """Build the streaming version of a causal encoder, which shares its modules.

    Args:
        chunk: encoder frames of a chunk.
        left: encoder frames of left context.

    Raises:
        ValueError: the encoder is not causal, or does not support these sizes.
    """
    return _ENCODERS[encoder.config.kind].stream(encoder, chunk, left)
