"""Bootstrap over utterances: intervals of error rates, and the significance of a difference.

Source: Bisani and Ney 2004, "Bootstrap estimates for confidence intervals in ASR performance
evaluation". A replication draws as many utterances as the set has, with replacement; both systems
are scored on the same draw, so utterances that are hard for both cancel in the difference.

Axes: N utterances, B replications.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

REPLICATIONS = 10_000
# Utterances drawn at a time, so that the draws stay in the cache; does not change the result.
_DRAWS_AT_ONCE = 50_000
_TAIL = 2.5


class PairedDifference(NamedTuple):
    """The error rate of a second system minus that of a first one, on the same utterances.

    difference: of the whole set; negative if the second system is better.
    lower, upper: 95% interval of the difference, by percentiles of the replications.
    improved: fraction of replications in which the second system has fewer errors; equal numbers
        count half.
    p_value: two-sided: twice the smaller fraction of replications with a difference of at most, or
        of at least, 0; at most 1.

    All are NaN if no reference has a word.
    """

    difference: float
    lower: float
    upper: float
    improved: float
    p_value: float


def rate_interval(
    errors: Sequence[int],
    words: Sequence[int],
    *,
    replications: int = REPLICATIONS,
    seed: int = 0,
) -> tuple[float, float]:
    """The 95% interval of an error rate, by percentiles; (nan, nan) without reference words.

    Args:
        errors, words: numbers of errors and reference words of each utterance, (N,).
    """
    rates_B = _replicated_rates(errors, words, replications, seed)
    if not len(rates_B):
        return float("nan"), float("nan")
    lower, upper = np.percentile(rates_B, [_TAIL, 100 - _TAIL])
    return float(lower), float(upper)


def paired_difference(
    first: Sequence[int],
    second: Sequence[int],
    words: Sequence[int],
    *,
    replications: int = REPLICATIONS,
    seed: int = 0,
) -> PairedDifference:
    """Compare two systems on the same utterances by paired bootstrap.

    Args:
        first, second: numbers of errors of both systems in each utterance, (N,).
        words: numbers of reference words, (N,).

    Raises:
        ValueError: the numbers of utterances differ.
    """
    if not len(first) == len(second) == len(words):
        raise ValueError(
            f"first, second and words must have one number for each utterance, got {len(first)}, "
            f"{len(second)} and {len(words)}"
        )
    if sum(words) == 0:
        return PairedDifference(*(float("nan"),) * 5)
    more = [b - a for a, b in zip(first, second, strict=True)]
    differences_B = _replicated_rates(more, words, replications, seed)
    lower, upper = np.percentile(differences_B, [_TAIL, 100 - _TAIL])
    better = float(np.mean(differences_B < 0))
    equal = float(np.mean(differences_B == 0))
    return PairedDifference(
        difference=sum(more) / sum(words),
        lower=float(lower),
        upper=float(upper),
        improved=better + equal / 2,
        p_value=min(1.0, 2 * min(better + equal, 1 - better)),
    )


def _replicated_rates(
    errors: Sequence[int], words: Sequence[int], replications: int, seed: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """(B,) error rates of the replications that have a reference word."""
    size = len(words)
    if not size:
        return np.zeros(0)
    # One number each, so that one pass sums both.
    counts_N = np.asarray(errors) + 1j * np.asarray(words)
    generator = np.random.default_rng(seed)
    at_once = max(1, _DRAWS_AT_ONCE // size)
    sums_B = np.concatenate(
        [
            counts_N.take(
                generator.integers(size, size=(min(at_once, replications - done), size))
            ).sum(1)
            for done in range(0, replications, at_once)
        ]
    )
    sums_B = sums_B[sums_B.imag > 0]
    return np.asarray(sums_B.real / sums_B.imag)
