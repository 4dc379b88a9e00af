"""LSTM predictor (Graves 2012), whose output depends on all previous symbols, and its layers.

Axes: N batch, U symbols, L layers, R rows of a search, P predictor width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from pruned_rnnt.model.predictor import AnyPredictorConfig, Predictor, State


def check_lstm_sizes(section: str, *, dim: int, layers: int, dropout: float) -> None:
    """Raise ValueError, with the setting's name in `section`, if a size is out of range."""
    for name, value in (("dim", dim), ("layers", layers)):
        if value < 1:
            raise ValueError(f"{section}.{name} is {value}, needs at least 1")
    if not 0 <= dropout < 1:
        raise ValueError(f"{section}.dropout is {dropout}, needs 0 <= x < 1")


class _LstmLayers(nn.LSTM):
    """`nn.LSTM` in the precision of its parameters on a CPU, also in mixed precision.

    oneDNN has no LSTM in bfloat16 on most processors, and raises an error there.
    """

    def forward(self, *arguments: Any) -> Any:
        if not self.weight_ih_l0.is_cpu:
            return super().forward(*arguments)
        with torch.autocast("cpu", enabled=False):
            return super().forward(*arguments)


def lstm_layers(dim: int, layers: int, dropout: float) -> nn.LSTM:
    """Layers of one width over (N, U, dim), with dropout between them."""
    # torch warns if a single layer has dropout.
    between = dropout if layers > 1 else 0.0
    return _LstmLayers(dim, dim, layers, batch_first=True, dropout=between)


@dataclass(frozen=True, kw_only=True)
class LstmPredictorConfig(AnyPredictorConfig):
    """Embedding and LSTM layers.

    kind: `lstm`, or `stateless` for the other predictor.
    dim: width of the embedding and of every layer.
    layers: number of LSTM layers.
    dropout: probability of dropping an input value of each layer in training.
    """

    kind: Literal["lstm"] = "lstm"
    layers: int = 1
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_lstm_sizes("model.predictor", dim=self.dim, layers=self.layers, dropout=self.dropout)


class LstmPredictor(Predictor):
    """Embedding and LSTM layers; blank is the start symbol.

    The state is two tensors (R, L, P): outputs and cells of the layers.
    """

    def __init__(self, config: LstmPredictorConfig, vocab_size: int, blank: int = 0) -> None:
        super().__init__()
        self.config = config
        self.context_size = 1
        self.blank = blank
        self.embedding = nn.Embedding(vocab_size, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.lstm = lstm_layers(config.dim, config.layers, config.dropout)

    def forward_targets(self, targets_NU: Tensor) -> Tensor:
        symbols_NU = functional.pad(targets_NU.long(), (1, 0), value=self.blank)
        output_NUP, _ = self.lstm(self.dropout(self.embedding(symbols_NU)))
        output: Tensor = output_NUP
        return output

    def start(self, rows: int, device: torch.device) -> tuple[Tensor, State]:
        zeros_RLP = self.embedding.weight.new_zeros(rows, self.config.layers, self.config.dim)
        blank_R = torch.full((rows,), self.blank, device=device)
        return self.step(blank_R, (zeros_RLP, zeros_RLP))

    def step(self, symbols_R: Tensor, state: State) -> tuple[Tensor, State]:
        # Without cuDNN, whose calls cannot always be captured in a CUDA graph.
        hidden_RLP, cell_RLP = state
        output_RP = self.embedding(symbols_R)
        outputs, cells = [], []
        for layer, weights in enumerate(self.lstm.all_weights):
            before = hidden_RLP[:, layer].contiguous(), cell_RLP[:, layer].contiguous()
            output_RP, cell_RP = torch.lstm_cell(output_RP, before, *weights)
            outputs.append(output_RP)
            cells.append(cell_RP)
        return output_RP, (torch.stack(outputs, dim=1), torch.stack(cells, dim=1))
