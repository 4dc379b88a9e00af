"""Rows of a beam: log-probabilities, hashes of sequences, extension, merging of equal sequences.

Axes: N batch, B beam, K best, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

# Knuth's 64-bit LCG multiplier. It is odd, so that multiplication modulo 2**64 is invertible.
_HASH_MULTIPLIER = 6364136223846793005


def joint_log_probs(logits: Tensor, blank: int, hat: bool) -> Tensor:
    """(..., V) logits -> float32 log-probabilities of blank and symbols.

    With `hat` (arXiv 2003.07705), blank has a sigmoid; a softmax over symbols divides the rest.
    """
    if not hat:
        return logits.float().log_softmax(dim=-1)
    logits = logits.float()
    blank_logit = logits[..., blank : blank + 1]
    is_blank = torch.arange(logits.size(-1), device=logits.device) == blank
    symbols = logits.masked_fill(is_blank, -torch.inf).log_softmax(dim=-1)
    return torch.where(
        is_blank, functional.logsigmoid(blank_logit), functional.logsigmoid(-blank_logit) + symbols
    )


def hash_after(hash_before: Tensor, symbols: Tensor) -> Tensor:
    """64-bit hashes of sequences after one more symbol; that of the empty sequence is 0."""
    return hash_before * _HASH_MULTIPLIER + symbols + 1


class Extended(NamedTuple):
    """The best extensions of the rows of a beam, (N, B) each, best first.

    score: before equal sequences are merged; parent, symbol (maybe blank): the row and what extends
    it; emits: symbol is not blank; added: the score that the symbol added; hash: of the sequences.
    """

    score: Tensor
    parent: Tensor
    symbol: Tensor
    emits: Tensor
    added: Tensor
    hash: Tensor


def extend_beam(score_NB: Tensor, hash_NB: Tensor, added_NBV: Tensor, blank: int) -> Extended:
    """The B best extensions by blank or a symbol.

    Args:
        added_NBV: the score that each symbol adds to each row.
    """
    candidates = (score_NB.unsqueeze(-1) + added_NBV).flatten(1)
    score_NB, index_NB = candidates.topk(score_NB.size(1), dim=1)
    vocab_size = added_NBV.size(2)
    parent_NB, symbol_NB = index_NB // vocab_size, index_NB % vocab_size
    emits_NB = symbol_NB != blank
    hash_NB = hash_NB.gather(1, parent_NB)
    hash_NB = torch.where(emits_NB, hash_after(hash_NB, symbol_NB), hash_NB)
    added_NB = added_NBV.flatten(1).gather(1, index_NB)
    return Extended(score_NB, parent_NB, symbol_NB, emits_NB, added_NB, hash_NB)


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
