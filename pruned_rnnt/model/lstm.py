"""LSTM layers of the predictor and the language model."""

from __future__ import annotations

from torch import nn


def check_lstm_sizes(section: str, *, dim: int, layers: int, dropout: float) -> None:
    """Raise ValueError, with the setting's name in `section`, if a size is out of range."""
    for name, value in (("dim", dim), ("layers", layers)):
        if value < 1:
            raise ValueError(f"{section}.{name} is {value}, needs at least 1")
    if not 0 <= dropout < 1:
        raise ValueError(f"{section}.dropout is {dropout}, needs 0 <= x < 1")


def lstm_layers(dim: int, layers: int, dropout: float) -> nn.LSTM:
    """Layers of one width over (N, U, dim), with dropout between them."""
    # torch warns if a single layer has dropout.
    between = dropout if layers > 1 else 0.0
    return nn.LSTM(dim, dim, layers, batch_first=True, dropout=between)
