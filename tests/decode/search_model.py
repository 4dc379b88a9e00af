"""A model whose decisions are never close, encoder frames for it, and a sum over all its paths."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from pruned_rnnt.decode.search.beam import ModifiedBeamSearch
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.model.predictor import (
    AnyPredictorConfig,
    LstmPredictorConfig,
    PredictorConfig,
    StatelessPredictor,
)
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.ops.search.beam_rows import joint_log_probs
from tests.tiny_models import randomise, tiny_conformer, tiny_model

VOCAB = 5
UNKNOWN = 2


def make_model(
    context_size: int = 2, hat: bool = False, seed: int = 1, lstm: bool = False, **loss: Any
) -> TransducerModel:
    """loss: other fields of `LossConfig`."""
    predictor: AnyPredictorConfig = PredictorConfig(dim=8, context_size=context_size)
    if lstm:
        predictor = LstmPredictorConfig(dim=8, layers=2)
    encoder = tiny_conformer(dim=8)
    loss["hat"] = hat
    model = tiny_model(encoder, VOCAB, predictor=predictor, joiner_dim=8, seed=seed, **loss)
    convolution = None
    if isinstance(model.predictor, StatelessPredictor):
        convolution = model.predictor.convolution
    randomise(convolution or model.predictor, scale=2)
    return model


def modified_beam_search(
    model: TransducerModel, frames: Tensor, lengths: Tensor, **options: Any
) -> list[list[Hypothesis]]:
    """Decode one batch; options as for `ModifiedBeamSearch`."""
    return ModifiedBeamSearch(model, **options)(frames, lengths)


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
    """Log-probability of every sequence, over all paths with at most one symbol per frame."""
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
