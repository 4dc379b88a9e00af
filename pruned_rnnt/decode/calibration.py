"""Calibration of a model's word times and confidences on a dev set: RUN/calibration.json.

`pruned-rnnt decode RUN decode.split=dev --calibrate` writes the file; all commands that print times
and confidences of words use it, and an exported model contains it.

The fit of the times: every observation is a distance in seconds that is the sum of at most two
unknowns, the time after one symbol and the time before another one. If a set has the times of its
words, both are observed for each word. If not, only the boundaries of the speech are known: the
time before the first symbol and after the last one of an utterance; and between two symbols the sum
of both. The boundaries make the solution unique.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.system.json_file import damaged, from_json, read_json

# Logits of 1e-4 and 1 - 1e-4, the smallest and the largest confidence that is printed.
_MOST_LOGIT = 9.21
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


@dataclass(frozen=True, kw_only=True)
class SymbolTimes:
    """Distances between symbols and the boundaries of their words, in seconds, by symbol id.

    before: from the start of a word to the frame of its first symbol.
    after: from the frame of its last symbol to the end of the word.
    """

    before: tuple[float, ...]
    after: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class ConfidenceMap:
    """The probability that a word is correct: a logistic function that grows with both scores.

    bias, path, head: sigmoid(bias + path * logit(p) + head * logit(q)), where p is the smallest
    probability of the word's symbols on the path of the search, and q that by the CTC head.
    """

    bias: float
    path: float
    head: float

    def __call__(self, path_log_prob: float, head_log_prob: float | None) -> float:
        """A probability from the smallest log-probabilities; a missing head counts as 0.5."""
        value = self.bias + self.path * logit(path_log_prob)
        if head_log_prob is not None:
            value += self.head * logit(head_log_prob)
        return 1 / (1 + math.exp(-value)) if value > -30 else 0.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """times, confidence: None if the set has nothing to fit them to.

    source: the set and the checkpoint.
    """

    times: SymbolTimes | None
    confidence: ConfidenceMap | None
    source: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_empty(self) -> bool:
        """Whether nothing could be fitted."""
        return self.times is None and self.confidence is None

    def missing_lines(self) -> list[str]:
        """What could not be fitted and why, for the output of `decode --calibrate`."""
        lines = []
        if self.is_empty:
            lines.append("calibration: the set has nothing to fit it to, so none is saved")
        if self.times is None:
            lines.append(
                "calibration: times of words are not calibrated: that needs word times of the set "
                "(alignments), or a transducer with a CTC head and features other than NeMo's"
            )
        if self.confidence is None:
            lines.append(
                "calibration: confidences of words are not calibrated: that needs decoded words; "
                "phrases in scripts without spaces do not count as words"
            )
        return lines

    @property
    def digest(self) -> str:
        """Hexadecimal digits, equal for equal times and confidences."""
        return hashlib.sha256(json.dumps(self.to_dict()).encode()).hexdigest()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Calibration:
        """Raises TypeError or ValueError if the values are not those of `to_dict`."""
        found = from_json(cls, values)
        numbers = () if found.times is None else (*found.times.before, *found.times.after)
        if found.confidence is not None:
            numbers += (found.confidence.bias, found.confidence.path, found.confidence.head)
        if not all(map(math.isfinite, numbers)):
            raise ValueError("a time or weight is not finite")
        return found


def logit(log_prob: float) -> float:
    """log(p / (1 - p)), bounded to that of 1e-4 and 1 - 1e-4."""
    log_prob = min(log_prob, -1e-9)
    return max(-_MOST_LOGIT, min(_MOST_LOGIT, log_prob - math.log(-math.expm1(log_prob))))


def save_calibration(folder: Path, calibration: Calibration) -> Path:
    """Write `folder`/calibration.json; returns its path."""
    path = RunFolder(folder).calibration
    path.write_text(json.dumps(calibration.to_dict()) + "\n", encoding="utf-8")
    return path


def read_calibration(folder: Path, vocab_size: int) -> Calibration | None:
    """The saved calibration; None if there is none.

    Raises:
        ValueError: the file is damaged, or of a model with another number of symbols.
    """
    path = RunFolder(folder).calibration
    if not path.is_file():
        return None
    advice = (
        "remove it, or write it again with `pruned-rnnt decode "
        f"{folder} decode.split=dev --calibrate`"
    )
    values = read_json(path, advice)
    try:
        found = Calibration.from_dict(values)
    except (OverflowError, TypeError, ValueError) as error:
        raise damaged(path, error, advice) from error
    if found.times is not None and {len(found.times.before), len(found.times.after)} != {
        vocab_size
    }:
        raise ValueError(
            f"{path} has times of {len(found.times.before)} symbols, the model has {vocab_size}: "
            "it belongs to another model; remove it"
        )
    return found


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
