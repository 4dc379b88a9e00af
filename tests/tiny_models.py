"""Encoders and models that are small in every dimension and run in milliseconds."""

from __future__ import annotations

from typing import Any

import torch

from pruned_rnnt.model.conformer import ConformerConfig
from pruned_rnnt.model.encoder import EncoderConfig
from pruned_rnnt.model.fastconformer import FastConformerConfig
from pruned_rnnt.model.model_config import LossConfig, ModelConfig
from pruned_rnnt.model.predictor import AnyPredictorConfig, PredictorConfig
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.model.zipformer.config import ZipformerConfig

_ONE_LAYER: dict[str, Any] = {
    "layers": 1,
    "dim": 16,
    "heads": 2,
    "feedforward_dim": 16,
    "kernel_size": 3,
    "subsampling_channels": 4,
    "chunk_size": 4,
    "left_chunks": 2,
}


def tiny_conformer(**changes: Any) -> ConformerConfig:
    """One layer of width 16; causal ones see chunks of 4 frames and two before."""
    return ConformerConfig(**{**_ONE_LAYER, **changes})


def tiny_fastconformer(**changes: Any) -> FastConformerConfig:
    """As `tiny_conformer`, with input scaling."""
    return FastConformerConfig(**{**_ONE_LAYER, "scale_input": True, **changes})


_TWO_STACKS: dict[str, Any] = {
    "layers": (1, 1),
    "dims": (16, 24),
    "heads": (2, 2),
    "kernel_sizes": (7, 7),
    "value_head_dim": 4,
}


def tiny_zipformer(*, causal: bool) -> ZipformerConfig:
    """Two stacks of one layer; causal ones see chunks of 4 encoder frames."""
    return ZipformerConfig(
        **_TWO_STACKS,
        downsampling=(1, 4),
        unmasked_dims=(8, 12),
        feedforward_dims=(24, 32),
        query_head_dim=6,
        position_head_dim=4,
        position_dim=12,
        causal=causal,
        chunk_sizes=(8, -1),
        left_contexts=(16, -1),
        chunk_size=8,
        left_context=16,
    )


def zipformer_of_icefall(*, causal: bool = False) -> ZipformerConfig:
    """Every size except position_head_dim can be read from the parameters."""
    return ZipformerConfig(
        **_TWO_STACKS,
        downsampling=(1, 2),
        unmasked_dims=(16, 24),
        feedforward_dims=(16, 24),
        query_head_dim=4,
        causal=causal,
    )


def tiny_model(
    encoder: EncoderConfig | None = None,
    vocab_size: int = 7,
    *,
    predictor: AnyPredictorConfig | None = None,
    joiner_dim: int = 16,
    seed: int = 0,
    **loss: Any,
) -> TransducerModel:
    """A model in evaluation mode whose joiner makes emissions likely and decisions clear.

    Args:
        encoder: default: `tiny_conformer()`.
        predictor: default: stateless, of width 8.
        loss: fields of `LossConfig`.
    """
    torch.manual_seed(seed)
    config = ModelConfig(
        encoder=encoder or tiny_conformer(),
        predictor=predictor or PredictorConfig(dim=8),
        joiner_dim=joiner_dim,
    )
    model = TransducerModel(config, vocab_size, LossConfig(**loss)).eval()
    randomise(model.joiner)
    return model


@torch.no_grad()
def randomise(module: torch.nn.Module, scale: float = 1.0) -> None:
    """Draw all parameters from a normal distribution."""
    for parameter in module.parameters():
        parameter.copy_(scale * torch.randn_like(parameter))
