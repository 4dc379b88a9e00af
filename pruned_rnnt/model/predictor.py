"""Stateless predictor (Ghodsi et al. 2020): the last one or two symbols, and no more.

Axes: N batch, U symbols, L symbols with their start context, C context size, P predictor width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class PredictorConfig:
    """Width, and how many symbols of the past are seen (1 or 2)."""

    dim: int = 128
    context_size: int = 2

    def __post_init__(self) -> None:
        if self.context_size not in (1, 2):
            raise ValueError(
                f"model.predictor.context_size is {self.context_size}, needs to be 1 or 2"
            )
        if self.dim % 4:
            raise ValueError(f"model.predictor.dim is {self.dim}, needs a multiple of 4")


class StatelessPredictor(nn.Module):
    """Embedding, grouped convolution over the context, ReLU.

    A negative symbol embeds to zero. The start context is [-1, ..., -1, blank], as recognisers
    which run exported models expect.
    """

    def __init__(self, config: PredictorConfig, vocab_size: int, blank: int = 0) -> None:
        super().__init__()
        self.context_size = config.context_size
        self.blank = blank
        self.embedding = nn.Embedding(vocab_size, config.dim)
        self.convolution = nn.Conv1d(
            config.dim, config.dim, config.context_size, groups=config.dim // 4, bias=False
        )

    def start_context(self, batch_size: int, device: torch.device) -> Tensor:
        """(N, C) int64: what is 'seen' before the first symbol."""
        context_NC = torch.full((batch_size, self.context_size), -1, device=device)
        context_NC[:, -1] = self.blank
        return context_NC

    def forward(self, symbols_NL: Tensor) -> Tensor:
        """Predictor output after every window of C symbols: (N, L) -> (N, L - C + 1, P)."""
        embedded_NLP = self.embedding(symbols_NL.clamp(min=0))
        embedded_NLP = embedded_NLP * (symbols_NL >= 0).unsqueeze(-1)
        mixed_NPL = self.convolution(embedded_NLP.transpose(1, 2))
        return torch.relu(mixed_NPL.transpose(1, 2))

    def forward_targets(self, targets_NU: Tensor) -> Tensor:
        """Output before each target and after the last one: (N, U) -> (N, U + 1, P)."""
        start_NC = self.start_context(targets_NU.size(0), targets_NU.device)
        output: Tensor = self(torch.cat((start_NC, targets_NU.long()), dim=1))
        return output
