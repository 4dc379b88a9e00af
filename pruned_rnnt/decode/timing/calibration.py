"""Calibration of a model's word times and confidences on a dev set: RUN/calibration.json.

`pruned-rnnt decode RUN decode.split=dev --calibrate` writes the file; all commands that print times
and confidences of words use it, and an exported model contains it.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.system.json_file import damaged, from_json, read_json

# Logits of 1e-4 and 1 - 1e-4, the smallest and the largest confidence that is printed.
_MOST_LOGIT = 9.21


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
    """times, confidence: None if the set was too small to fit them.

    source: the set and the checkpoint.
    """

    times: SymbolTimes | None
    confidence: ConfidenceMap | None
    source: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

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
