"""The available encoders, by their names in `model.encoder.kind` of configuration files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pruned_rnnt.config.load import ConfigError, from_dict
from pruned_rnnt.model.conformer import Conformer, ConformerConfig
from pruned_rnnt.model.conformer_streaming import StreamingConformer
from pruned_rnnt.model.encoder import Encoder, EncoderConfig, StreamingEncoder
from pruned_rnnt.model.ensemble_encoder import EnsembleConfig, EnsembleEncoder
from pruned_rnnt.model.fastconformer import (
    FastConformer,
    FastConformerConfig,
    StreamingFastConformer,
)
from pruned_rnnt.model.subsampling import SUBSAMPLING_FACTOR
from pruned_rnnt.model.transformers_encoder import build_transformers_encoder
from pruned_rnnt.model.transformers_model import TransformersConfig
from pruned_rnnt.model.zipformer.config import ZipformerConfig
from pruned_rnnt.model.zipformer.zipformer import StreamingZipformer, Zipformer


class _EncoderKind(NamedTuple):
    config: type[EncoderConfig]
    module: Callable[[Any], Encoder]
    stream: Callable[[Any, int, int], StreamingEncoder] | None


def _build_ensemble(config: EnsembleConfig) -> EnsembleEncoder:
    """Raises ConfigError for a member whose settings are wrong."""
    members = []
    for number, values in enumerate(config.members):
        source = f"model.encoder.members[{number}]"
        kind = values.get("kind") if isinstance(values, Mapping) else None
        if not isinstance(kind, str) or kind not in ENCODER_CONFIGS:
            raise ConfigError(f"{source} is {values!r}, needs the settings of an encoder")
        members.append(build_encoder(from_dict(ENCODER_CONFIGS[kind], values, source)))
    if not members:
        raise ConfigError("model.encoder.members is empty: `pruned-rnnt ensemble` makes ensembles")
    return EnsembleEncoder(config, members)


_ENCODERS = {
    "conformer": _EncoderKind(ConformerConfig, Conformer, StreamingConformer),
    "ensemble": _EncoderKind(EnsembleConfig, _build_ensemble, None),
    "fastconformer": _EncoderKind(FastConformerConfig, FastConformer, StreamingFastConformer),
    "transformers": _EncoderKind(TransformersConfig, build_transformers_encoder, None),
    "zipformer": _EncoderKind(ZipformerConfig, Zipformer, StreamingZipformer),
}
_BUILT_IN = frozenset(_ENCODERS)
ENCODER_CONFIGS = {name: kind.config for name, kind in _ENCODERS.items()}


def register_encoder(
    config: type[EncoderConfig],
    module: Callable[[Any], Encoder],
    stream: Callable[[Any, int, int], StreamingEncoder] | None = None,
) -> None:
    """Add an encoder of your own, which `model.encoder.kind` can then name; see docs/extend.md.

    Args:
        config: a frozen dataclass with the settings; the default of its field `kind` is the name.
        module: makes the encoder from its settings: its class, or a function with an attribute
            `subsampling_factor`.
        stream: makes a streaming encoder from an encoder, a chunk and its left context in encoder
            frames; None if it cannot stream.

    Raises:
        TypeError: `config` is not a dataclass that is derived from EncoderConfig, or `module` does
            not say its `subsampling_factor`.
        ValueError: `kind` has no default, or is that of an encoder of this package.
    """
    is_class = isinstance(config, type) and issubclass(config, EncoderConfig)
    if not is_class or not dataclasses.is_dataclass(config):
        raise TypeError(f"config is {config!r}, needs a dataclass derived from EncoderConfig")
    name = next(field.default for field in dataclasses.fields(config) if field.name == "kind")
    if not isinstance(name, str):
        raise ValueError(f"{config.__name__}.kind has no default, needs the name of the encoder")
    if name in _BUILT_IN:
        raise ValueError(
            f"{config.__name__}.kind is {name!r}, an encoder of this package; needs another name"
        )
    if not hasattr(module, "subsampling_factor"):
        raise TypeError(
            f"module is {module!r}, which has no subsampling_factor: set this attribute to the "
            "feature frames per encoder frame, so that utterances with too few frames are found"
        )
    _ENCODERS[name] = _EncoderKind(config, module, stream)
    ENCODER_CONFIGS[name] = config


def build_encoder(config: EncoderConfig) -> Encoder:
    """Build the encoder of a configuration, with random parameters."""
    return _ENCODERS[config.kind].module(config)


def subsampling_factor(config: EncoderConfig) -> int:
    """Feature frames per encoder frame, as the class of the encoder says."""
    module = _ENCODERS[config.kind].module
    return int(getattr(module, "subsampling_factor", SUBSAMPLING_FACTOR))


def stream_encoder(encoder: Encoder, chunk: int, left: int) -> StreamingEncoder:
    """Build the streaming version of a causal encoder, which shares its modules.

    Args:
        chunk: encoder frames of a chunk.
        left: encoder frames of left context.

    Raises:
        ValueError: the encoder is not causal, does not support these sizes, or has adapters or
            rounded weights, which work by hooks of `forward` that a stream does not call.
    """
    encoder.check_causal()
    for hook in encoder._forward_pre_hooks.values():
        if reason := getattr(getattr(hook, "__self__", None), "no_stream", ""):
            raise ValueError(f"the encoder cannot stream, because it {reason}")
    stream = _ENCODERS[encoder.config.kind].stream
    if stream is None:
        raise ValueError(
            f"the encoder {encoder.config.kind!r} cannot stream: register_encoder got no `stream`"
        )
    return stream(encoder, chunk, left)
