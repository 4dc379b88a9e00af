"""The interface of scores that beam search adds to those of the model.

Axes: R rows (hypotheses of all utterances), V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pruned_rnnt.decode.search.rows import Rows


class TokenScorer(Protocol):
    """Scores of next symbols from a state of each hypothesis; scales are included.

    capturable: `scores` and `advance` read nothing from a CUDA device, so that a search may capture
        them in a CUDA graph.
    """

    capturable: bool

    def start(self, rows: int, device: torch.device) -> Rows:
        """The state of empty hypotheses."""

    def scores(self, state: Rows) -> Tensor:
        """(R, V) float32 to add to the score of each next symbol; that of blank is ignored."""

    def advance(self, state: Rows, symbols_R: Tensor, emits_R: Tensor) -> Rows:
        """The state after one more symbol.

        Where `emits_R` is False, the symbol may be blank, and the search keeps the old state
        instead of the returned one.
        """

    def final(self, state: Rows) -> Tensor:
        """(R,) float32 to add to the score of each hypothesis at its end."""
