"""Rows of a beam: hashes of their sequences, merging of equal sequences, and the final order.

Axes: N batch, B beam, K best.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Knuth's 64-bit LCG multiplier. It is odd, so that multiplication modulo 2**64 is invertible.
_HASH_MULTIPLIER = 6364136223846793005


def hash_after(hash_before: Tensor, symbols: Tensor) -> Tensor:
    """64-bit hashes of sequences after one more symbol; that of the empty sequence is 0."""
    return hash_before * _HASH_MULTIPLIER + symbols + 1


def merge_equal(score_NB: Tensor, hash_NB: Tensor) -> Tensor:
    """Move the summed probability of equal sequences to the first of them."""
    equal_NBB = hash_NB.unsqueeze(2) == hash_NB.unsqueeze(1)
    spread_NBB = score_NB.unsqueeze(1).masked_fill(~equal_NBB, -torch.inf)
    first_NB = equal_NBB.int().argmax(dim=2) == torch.arange(
        score_NB.size(1), device=score_NB.device
    )
    return spread_NBB.logsumexp(dim=2).masked_fill(~first_NB, -torch.inf)


def best_rows(
    score_NB: Tensor, num_best: int, divisor_NB: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The rows with the highest scores, best first: their indices (N, K) and scores (N, K).

    Args:
        num_best: K.
        divisor_NB: order by score / divisor; returned scores are not divided.
    """
    rank_NB = score_NB if divisor_NB is None else score_NB / divisor_NB
    kept_NK = rank_NB.argsort(dim=1, descending=True, stable=True)[:, :num_best]
    return kept_NK, score_NB.gather(1, kept_NK)
