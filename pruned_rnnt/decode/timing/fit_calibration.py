"""Fit a calibration on a dev set: the distances between symbols and the boundaries of their words,
and the map from scores of a word to the probability that the word is correct.

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

from pruned_rnnt.decode.timing.calibration import ConfidenceMap, SymbolTimes, logit

_FloatArray = npt.NDArray[np.float64]
# A symbol's time is pulled towards a linear function of its number of letters as strongly as by
# half an observation.
_PRIOR_WEIGHT = 0.5
# Observations that are off by more than this count less: pauses, and wrong texts.
_USUAL_ERROR = 0.08
_ITERATIONS = 5
# Of the residual, relative to that of zeros.
_TOLERANCE = 1e-9
_NEWTON_STEPS = 50
# Variance of a normal prior of the two weights, which keeps them finite on small sets.
_PRIOR_VARIANCE = 1.0


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


def fit_confidence(
    scores: Sequence[tuple[float, float | None]], right: Sequence[bool]
) -> ConfidenceMap | None:
    """Logistic regression with weights that are not negative; None without words.

    Args:
        scores: for each word, the smallest log-probability of its symbols on the path, and by the
            CTC head (None for a model without one).
        right: whether the word is correct.
    """
    if not scores:
        return None
    path = np.array([logit(path) for path, _ in scores])
    head = np.array([0.0 if head is None else logit(head) for _, head in scores])
    features = np.stack([np.ones(len(scores)), path, head], axis=1)
    count, total = sum(right), len(right)
    # Platt 1999: targets inside 0 and 1, so that a set without errors has a finite solution.
    targets = np.where(right, (count + 1) / (count + 2), 1 / (total - count + 2))
    used = [0, 1, 2] if np.any(head) else [0, 1]
    weights = np.zeros(3)
    while True:
        weights[:] = 0.0
        weights[used] = _regression(features[:, used], targets)
        negative = [index for index in used if index > 0 and weights[index] < 0]
        if not negative:
            break
        used = [index for index in used if index not in negative]
    bias, path_weight, head_weight = (round(float(weight), 6) for weight in weights)
    return ConfidenceMap(bias=bias, path=path_weight, head=head_weight)


def _regression(features: _FloatArray, targets: _FloatArray) -> _FloatArray:
    """Newton's method, with steps halved until the objective falls."""
    precision = np.array([0.0, *[1 / _PRIOR_VARIANCE] * (features.shape[1] - 1)])
    weights = np.zeros(features.shape[1])
    value = _objective(weights, features, targets, precision)
    for _ in range(_NEWTON_STEPS):
        found = 1 / (1 + np.exp(-features @ weights))
        gradient = features.T @ (found - targets) + precision * weights
        curvature = (features.T * (found * (1 - found))) @ features + np.diag(precision + 1e-9)
        step = np.linalg.solve(curvature, gradient)
        size = 1.0
        while size > 1e-4:
            tried = weights - size * step
            new = _objective(tried, features, targets, precision)
            if new < value:
                weights, value = tried, new
                break
            size /= 2
        else:
            break
    return weights


def _objective(
    weights: _FloatArray, features: _FloatArray, targets: _FloatArray, precision: _FloatArray
) -> float:
    values = features @ weights
    losses = np.logaddexp(0, values) - targets * values
    return float(losses.sum() + 0.5 * (precision * weights**2).sum())
