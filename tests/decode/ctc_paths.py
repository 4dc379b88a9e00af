"""All paths of small CTC lattices, as the reference of searches and alignments."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

BLANK = 0


def collapsed(path: tuple[int, ...]) -> tuple[int, ...]:
    """The sequence of a path: repetitions count once, blanks not."""
    return tuple(symbol for symbol, _ in itertools.groupby(path) if symbol != BLANK)


def scored_paths(log_probs_TV: Tensor) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every path and its log-probability."""
    rows = log_probs_TV.tolist()
    for path in itertools.product(range(log_probs_TV.size(1)), repeat=len(rows)):
        yield path, sum(row[symbol] for row, symbol in zip(rows, path, strict=True))


def all_sequences(log_probs_TV: Tensor) -> dict[tuple[int, ...], float]:
    """Log-probability of every sequence that has a path of finite score."""
    totals: dict[tuple[int, ...], list[float]] = {}
    for path, score in scored_paths(log_probs_TV):
        if score > -torch.inf:
            totals.setdefault(collapsed(path), []).append(score)
    return {
        symbols: float(torch.tensor(scores, dtype=torch.float64).logsumexp(0))
        for symbols, scores in totals.items()
    }


def best_path(log_probs_TV: Tensor, symbols: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
    """Frame of each symbol's first appearance in the best path of a sequence, and its score."""
    paths = [(s, path) for path, s in scored_paths(log_probs_TV) if collapsed(path) == symbols]
    score, path = max(paths)
    frames = [
        t for t, symbol in enumerate(path) if symbol != BLANK and (t == 0 or path[t - 1] != symbol)
    ]
    return tuple(frames), score
