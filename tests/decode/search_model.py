"""A model with random parameters, spread so that no decision is close, and encoder frames."""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.model.conformer import ConformerConfig
from pruned_rnnt.model.predictor import PredictorConfig
from pruned_rnnt.model.transducer import LossConfig, ModelConfig, TransducerModel

VOCAB = 5
UNKNOWN = 2


def make_model(context_size: int = 2, hat: bool = False, seed: int = 1) -> TransducerModel:
    torch.manual_seed(seed)
    config = ModelConfig(
        encoder=ConformerConfig(layers=1, dim=8, heads=2, feedforward_dim=8, kernel_size=3),
        predictor=PredictorConfig(dim=8, context_size=context_size),
        joiner_dim=8,
    )
    model = TransducerModel(config, VOCAB, LossConfig(hat=hat)).eval()
    with torch.no_grad():
        for parameter in model.joiner.parameters():
            parameter.copy_(torch.randn_like(parameter))
        model.predictor.convolution.weight.copy_(
            2 * torch.randn_like(model.predictor.convolution.weight)
        )
    return model


def encoded(lengths: list[int], seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    frames = torch.randn(len(lengths), max(lengths), 8, generator=generator) * 2
    return frames, torch.tensor(lengths)
