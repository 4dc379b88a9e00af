"""What may rate symbols in a beam search beside the model.

Axes: R rows (hypotheses of all utterances), V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pruned_rnnt.decode.search.rows import Rows


class TokenScorer(Protocol):
    """Scores of next symbols, given what it remembers of each hypothesis; scales included."""

    def start(self, rows: int, device: torch.device) -> Rows:
        """What is remembered of empty hypotheses."""

    def scores(self, state: Rows) -> Tensor:
        """(R, V) float32 to add to the score of each next symbol; the blank's is not used."""

    def advance(self, state: Rows, symbols_R: Tensor, emits_R: Tensor) -> Rows:
        """What is remembered after one more symbol.

        Rows where `emits_R` is false keep their old state, whatever is returned for them; their
        symbol may be the blank.
        """

    def final(self, state: Rows) -> Tensor:
        """(R,) float32 to add to the score of each hypothesis when it has ended."""
