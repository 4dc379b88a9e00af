"""The result of a search, and the log-probabilities that searches use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

# Logits of the joiner for projected encoder frames and projected predictor output.
JoinerFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """One decoded symbol sequence.

    symbols: ids, without blanks.
    frames: the encoder frame at which each symbol was emitted.
    score: natural log-probability: of the path for greedy search, of all paths kept in the beam for
        beam search.
    symbol_scores: increase of the score by each symbol at its frame, without its duration.
    durations: frames by which each symbol advanced; empty for models without durations.
    """

    symbols: tuple[int, ...]
    frames: tuple[int, ...]
    score: float
    symbol_scores: tuple[float, ...]
    durations: tuple[int, ...] = ()


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
