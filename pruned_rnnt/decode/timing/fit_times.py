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
# Of the residual, relative to that of zeros.
_TOLERANCE = 1e-9


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
    system = _System(distances, letters)
    seconds = np.array([distance.seconds for distance in distances])
    weights = np.ones(len(distances))
    found = np.zeros(system.unknowns)
    for _ in range(_ITERATIONS):
        found = system.solve(weights, seconds, start=found)
        weights = 1 / np.maximum(1.0, np.abs(seconds - system.sums(found)) / _USUAL_ERROR)
    count = np.array(letters, dtype=np.float64)
    return SymbolTimes(
        before=_rounded(found[0] + found[1] * count + found[4 : 4 + size]),
        after=_rounded(found[2] + found[3] * count + found[4 + size :]),
    )


class _System:
    """The linear system of the distances, of which a row has at most six unknowns.

    Unknowns: constant and slope of before and of after, and the deviation of each symbol. The
    matrix is never stored: a set of 200,000 distances and 4,000 symbols would need 15 GB.
    """

    def __init__(self, distances: Sequence[Distance], letters: Sequence[int]) -> None:
        size = len(letters)
        self.unknowns = 4 + 2 * size
        self.prior = np.array([1e-3] * 4 + [_PRIOR_WEIGHT] * (2 * size))
        rows, columns, values = [], [], []
        for name, base, own in (("before", 0, 4), ("after", 2, 4 + size)):
            for n, distance in enumerate(distances):
                if (symbol := getattr(distance, name)) is not None:
                    rows += [n] * 3
                    columns += [base, base + 1, own + symbol]
                    values += [1.0, letters[symbol], 1.0]
        self._rows, self._columns = np.array(rows), np.array(columns)
        self._values = np.array(values, dtype=np.float64)
        self._count = len(distances)

    def sums(self, unknowns: _FloatArray) -> _FloatArray:
        """The distances that these unknowns predict."""
        terms = self._values * unknowns[self._columns]
        return _sums(self._rows, terms, self._count)

    def _transposed(self, residuals: _FloatArray) -> _FloatArray:
        terms = self._values * residuals[self._rows]
        return _sums(self._columns, terms, self.unknowns)

    def solve(self, weights: _FloatArray, seconds: _FloatArray, start: _FloatArray) -> _FloatArray:
        """Weighted least squares with the prior, by preconditioned conjugate gradients."""
        squares = self._values**2 * weights[self._rows]
        diagonal = self.prior + _sums(self._columns, squares, self.unknowns)
        right = self._transposed(weights * seconds)

        def apply(unknowns: _FloatArray) -> _FloatArray:
            return self._transposed(weights * self.sums(unknowns)) + self.prior * unknowns

        found = start.copy()
        residual = right - apply(found)
        scaled = residual / diagonal
        direction, product = scaled, residual @ scaled
        least = _TOLERANCE**2 * (right @ (right / diagonal))
        for _ in range(10 * self.unknowns):
            if product <= least:
                break
            image = apply(direction)
            step = product / (direction @ image)
            found += step * direction
            residual -= step * image
            scaled = residual / diagonal
            before, product = product, residual @ scaled
            direction = scaled + product / before * direction
        return found


def _sums(places: npt.NDArray[np.int64], values: _FloatArray, size: int) -> _FloatArray:
    """The sum of the values of each place, (size,)."""
    return np.bincount(places, values, minlength=size).astype(np.float64)


def _rounded(values: _FloatArray) -> tuple[float, ...]:
    return tuple(round(float(value), 4) for value in values)
