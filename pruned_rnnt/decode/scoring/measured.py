"""Error rates that `pruned-rnnt decode` measured, stored in RUN/results for model cards.

scores-SET-SUFFIX.json      one measurement
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pruned_rnnt.decode.scoring.wer import (
    ErrorCounts,
    Transcript,
    confidence_interval,
    count_errors,
)

_PREFIX = "scores-"


@dataclass(frozen=True, kw_only=True)
class ErrorRate:
    """Errors of a set, and the 95% interval of their rate (as fractions; NaN without words)."""

    counts: ErrorCounts
    lower: float
    upper: float

    @classmethod
    def of(cls, transcripts: Sequence[Transcript]) -> ErrorRate:
        """Of transcripts in words or characters."""
        lower, upper = confidence_interval(transcripts)
        return cls(counts=count_errors(transcripts), lower=lower, upper=upper)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The result of decoding one set with one search.

    data, split: name of the prepared folder, and of the split.
    setting: search and its settings, as in the names of result files.
    model: fingerprint of the parameters.
    checkpoint: name of the checkpoint.
    code: version of the code that decoded the set.
    """

    data: str
    split: str
    setting: str
    model: str
    checkpoint: str
    utterances: int
    words: ErrorRate
    characters: ErrorRate
    code: str


def save_measurement(folder: Path, measurement: Measurement) -> Path:
    """Write a file in a run's folder of results; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = (measurement.split, measurement.setting, measurement.checkpoint)
    path = folder / f"{_PREFIX}{'-'.join(parts)}.json"
    path.write_text(json.dumps(asdict(measurement), indent=2) + "\n", encoding="utf-8")
    return path


def read_measurements(folder: Path, model: str) -> list[Measurement]:
    """The measurements of the model with this fingerprint in a run's folder of results.

    Raises:
        ValueError: a file is damaged; the message names it.
    """
    found = []
    for path in sorted(folder.glob(f"{_PREFIX}*.json")):
        try:
            measurement = _from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged ({error!r}): remove it, and run `pruned-rnnt decode` again"
            ) from error
        if measurement.model == model:
            found.append(measurement)
    return found


def _from_dict(values: dict[str, Any]) -> Measurement:
    rates = {
        name: ErrorRate(**{**values[name], "counts": ErrorCounts(**values[name]["counts"])})
        for name in ("words", "characters")
    }
    return Measurement(**{**values, **rates})
