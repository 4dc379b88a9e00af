"""The result of a search."""

from __future__ import annotations

from dataclasses import dataclass


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
