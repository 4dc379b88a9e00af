"""A constant bonus for every symbol in beam search, also called length reward or insertion bonus.

Axes: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.decode.search.rows import Rows


class SymbolBonus:
    """A `TokenScorer` that adds the same score to each symbol.

    Log-probabilities of a language model are negative, so that a large scale shortens the texts; a
    positive bonus makes up for it.

    Args:
        bonus: a natural log-probability; may be negative.
        vocab_size: V.
    """

    capturable = True

    def __init__(self, bonus: float, vocab_size: int) -> None:
        self._bonus = bonus
        self._vocab_size = vocab_size

    def start(self, rows: int, device: torch.device) -> Rows:
        return (torch.zeros(rows, device=device),)

    def scores(self, state: Rows) -> Tensor:
        return (state[0] + self._bonus)[:, None].expand(-1, self._vocab_size)

    def advance(self, state: Rows, symbols_R: Tensor, emits_R: Tensor) -> Rows:
        return state

    def final(self, state: Rows) -> Tensor:
        return state[0]
