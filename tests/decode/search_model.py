"""A model with random parameters, spread so that no decision is close; frames; all its paths."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from pruned_rnnt.decode.search.hypothesis import joint_log_probs
from pruned_rnnt.model.conformer import ConformerConfig
from pruned_rnnt.model.lstm_predictor import LstmPredictorConfig
from pruned_rnnt.model.predictor import PredictorConfig, StatelessPredictor
from pruned_rnnt.model.transducer_model import LossConfig, ModelConfig, TransducerModel

VOCAB = 5
UNKNOWN = 2


def make_model(
    context_size: int = 2, hat: bool = False, seed: int = 1, lstm: bool = False
) -> TransducerModel:
    torch.manual_seed(seed)
    config = ModelConfig(
        encoder=ConformerConfig(layers=1, dim=8, heads=2, feedforward_dim=8, kernel_size=3),
        predictor=(
            LstmPredictorConfig(dim=8, layers=2)
            if lstm
            else PredictorConfig(dim=8, context_size=context_size)
        ),
        joiner_dim=8,
    )
    model = TransducerModel(config, VOCAB, LossConfig(hat=hat)).eval()
    with torch.no_grad():
        for parameter in model.joiner.parameters():
            parameter.copy_(torch.randn_like(parameter))
        spread = list(model.predictor.parameters())
        if isinstance(model.predictor, StatelessPredictor) and model.predictor.convolution:
            spread = [model.predictor.convolution.weight]
        for parameter in spread:
            parameter.copy_(2 * torch.randn_like(parameter))
    return model


def encoded(lengths: list[int], seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    frames = torch.randn(len(lengths), max(lengths), 8, generator=generator) * 2
    return frames, torch.tensor(lengths)


@torch.no_grad()
def log_probs_after(model: TransducerModel, frame: Tensor, symbols: tuple[int, ...]) -> Tensor:
    context = model.predictor.start_context(1, frame.device)[0].tolist() + list(symbols)
    context = context[-model.predictor.context_size :]
    predicted = model.predictor(torch.tensor([context]))[:, 0]
    logits = model.joiner(
        model.joiner.encoder_proj(frame[None]), model.joiner.decoder_proj(predicted)
    )
    return joint_log_probs(logits[0], model.predictor.blank, model.loss_config.hat)


def all_sequences(model: TransducerModel, frames: Tensor) -> dict[tuple[int, ...], float]:
    """Log-probability of every sequence, over all ways to emit at most one symbol a frame."""
    totals: dict[tuple[int, ...], list[float]] = {}
    for path in itertools.product(range(VOCAB), repeat=len(frames)):
        symbols: tuple[int, ...] = ()
        score = 0.0
        for t, choice in enumerate(path):
            score += float(log_probs_after(model, frames[t], symbols)[choice])
            if choice != model.predictor.blank:
                symbols = (*symbols, choice)
        totals.setdefault(symbols, []).append(score)
    return {
        symbols: float(torch.tensor(scores, dtype=torch.float64).logsumexp(0))
        for symbols, scores in totals.items()
    }
