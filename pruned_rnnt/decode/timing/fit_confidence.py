"""Fit the map from scores of a word to the probability that the word is correct."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pruned_rnnt.decode.timing.calibration import ConfidenceMap, logit

_FloatArray = npt.NDArray[np.float64]
_ITERATIONS = 50
# Variance of a normal prior of the two weights, which keeps them finite on small sets.
_PRIOR_VARIANCE = 1.0


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
    for _ in range(_ITERATIONS):
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
