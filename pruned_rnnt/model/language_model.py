"""A language model over the symbols of a transducer: embedding, LSTM, softmax.

Axes: N batch, U symbols, W width, L layers, R rows of a search, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from pruned_rnnt.model.predictor import check_lstm_sizes, lstm_layers

# The same symbol starts and ends every text.
SOS_EOS = 1


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """Sizes of the language model.

    dim: width of the embedding and of every LSTM layer.
    layers: number of LSTM layers.
    dropout: probability of dropping an input value of each layer in training.
    tie_weights: share the parameters of the embedding and the softmax.
    """

    dim: int = 512
    layers: int = 2
    dropout: float = 0.1
    tie_weights: bool = True

    def __post_init__(self) -> None:
        check_lstm_sizes("model", dim=self.dim, layers=self.layers, dropout=self.dropout)


@dataclass(frozen=True, kw_only=True)
class LanguageModelLosses:
    """Losses of a batch of texts.

    objective: (), the sum of total, differentiable.
    total: (N,) float32, negative log-probability of each text and its end, without gradient.
    parts, measures: empty.
    """

    objective: Tensor
    total: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    measures: Mapping[str, Tensor] = field(default_factory=dict)


class LanguageModel(nn.Module):
    """log P(symbol | symbols before it)."""

    def __init__(self, config: LanguageModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.embedding = nn.Embedding(vocab_size, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.lstm = lstm_layers(config.dim, config.layers, config.dropout)
        self.output_linear = nn.Linear(config.dim, vocab_size)
        # The default initialisation would give large logits if weights are tied.
        nn.init.normal_(self.embedding.weight, std=config.dim**-0.5)
        if config.tie_weights:
            self.output_linear.weight = self.embedding.weight

    def forward(self, texts_NU: Tensor, lengths_N: Tensor) -> LanguageModelLosses:
        """Losses of texts.

        Args:
            texts_NU: (N, U) integer symbols, without start and end; padding may be any symbol.
            lengths_N: (N,) integer, number of symbols of each text.
        """
        # Padding may be negative.
        texts_NU = texts_NU.long().clamp(min=0)
        lengths_N1 = lengths_N.to(texts_NU.device)[:, None]
        inputs_NU = functional.pad(texts_NU, (1, 0), value=SOS_EOS)
        place_U = torch.arange(inputs_NU.size(1), device=texts_NU.device)
        targets_NU = functional.pad(texts_NU, (0, 1))
        targets_NU = torch.where(place_U == lengths_N1, SOS_EOS, targets_NU)
        hidden_NUW, _ = self.lstm(self.dropout(self.embedding(inputs_NU)))
        logits_NUV = self.output_linear(self.dropout(hidden_NUW))
        loss_NU = functional.cross_entropy(
            logits_NUV.float().transpose(1, 2), targets_NU, reduction="none"
        )
        loss_N = (loss_NU * (place_U <= lengths_N1)).sum(dim=1)
        return LanguageModelLosses(objective=loss_N.sum(), total=loss_N.detach())

    def start(self, rows: int) -> tuple[Tensor, ...]:
        """The state before the start symbol: two tensors (R, L, W)."""
        zeros = self.embedding.weight.new_zeros(rows, self.config.layers, self.config.dim)
        return zeros, zeros

    def step(
        self, symbols_R: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(R,) symbols -> (R, V) float32 log-probabilities of the next ones, and the new state."""
        hidden_LRW, cell_LRW = (x.transpose(0, 1).contiguous() for x in state)
        output_R1W, new = self.lstm(self.embedding(symbols_R)[:, None], (hidden_LRW, cell_LRW))
        log_probs_RV = self.output_linear(output_R1W[:, 0]).float().log_softmax(dim=-1)
        return log_probs_RV, tuple(x.transpose(0, 1) for x in new)
