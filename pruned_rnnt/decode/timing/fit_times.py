"""Fit the distances between symbols and the boundaries of their words.

Every observation is a distance in seconds that is the sum of at most two unknowns: the time after
one symbol, and the time before another one. If a set has the times of its words, both are observed
for each word. If not, only the boundaries of the speech are known: the time before the first symbol
and after the last one of an utterance; and between two symbols the sum of both. The boundaries make
the solution unique.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pruned_rnnt.decode.timing.calibration import SymbolTimes

_FloatArray = npt.NDArray[np.float64]
# A symbol's time is pulled towards a linear function of its number of letters as strongly as by
# half an observation.
_PRIOR_WEIGHT = 0.5
# Observations that are off by more than this count less: pauses, and wrong texts.
_USUAL_ERROR = 0.08
_ITERATIONS = 5


class Distance(NamedTuple):
    """seconds = after[`after`] + before[`before`]; None leaves out a term."""

    after: int | None
    before: int | None
    seconds: float


def fit_times(distances: Sequence[Distance], letters: Sequence[int]) -> SymbolTimes | None:
    """Least squares with less weight for outliers; None without distances.

    Args:
        letters: the number of letters of each symbol, by id.
    """
    if not distances:
        return None
    size = len(letters)
    # Unknowns: constant and slope of before and of after, and the deviation of each symbol.
    matrix = np.zeros((len(distances), 4 + 2 * size))
    for row, distance in zip(matrix, distances, strict=True):
        for symbol, base, own in ((distance.before, 0, 4), (distance.after, 2, 4 + size)):
            if symbol is not None:
                row[base] += 1.0
                row[base + 1] += letters[symbol]
                row[own + symbol] += 1.0
    seconds = np.array([distance.seconds for distance in distances])
    prior = np.array([1e-3] * 4 + [_PRIOR_WEIGHT] * (2 * size))
    weights = np.ones(len(distances))
    found = np.zeros(matrix.shape[1])
    for _ in range(_ITERATIONS):
        weighted = matrix * weights[:, None]
        found = np.linalg.solve(weighted.T @ matrix + np.diag(prior), weighted.T @ seconds)
        weights = 1 / np.maximum(1.0, np.abs(seconds - matrix @ found) / _USUAL_ERROR)
    count = np.array(letters, dtype=np.float64)
    return SymbolTimes(
        before=_rounded(found[0] + found[1] * count + found[4 : 4 + size]),
        after=_rounded(found[2] + found[3] * count + found[4 + size :]),
    )


def _rounded(values: _FloatArray) -> tuple[float, ...]:
    return tuple(round(float(value), 4) for value in values)
