"""Layers of LSTM, as the predictor and the language model have them."""

from __future__ import annotations

from torch import nn


def check_lstm_sizes(section: str, *, dim: int, layers: int, dropout: float) -> None:
    """Raises ValueError for sizes that there cannot be, by their names in `section`."""
    for name, value in (("dim", dim), ("layers", layers)):
        if value < 1:
            raise ValueError(f"{section}.{name} is {value}, needs at least 1")
    if not 0 <= dropout < 1:
        raise ValueError(f"{section}.dropout is {dropout}, needs 0 <= x < 1")


def lstm_layers(dim: int, layers: int, dropout: float) -> nn.LSTM:
    """Layers of one width over (N, U, dim); dropout stands between them."""
    # torch warns of dropout between the layers of a single one.
    between = dropout if layers > 1 else 0.0
    return nn.LSTM(dim, dim, layers, batch_first=True, dropout=between)
