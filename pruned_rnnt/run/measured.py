"""Error rates that `pruned-rnnt decode` measured, with the inputs of each: RUN/results/scores-*."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pruned_rnnt.decode.scoring.wer import (
    ErrorCounts,
    Transcript,
    confidence_interval,
    count_errors,
)
from pruned_rnnt.run.result_inputs import ResultInputs
from pruned_rnnt.system.json_file import damaged, from_json, read_json

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
    metric: wer or cer: which of `words` and `characters` describes the set.
    lost_runs: number of runs of three or more words without text; None in files of version 0.1.
    inputs: of the computation; None in files of version 0.1.
    configuration: sections `decode` and `data`, and the paths of files as they were named.
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
    metric: str = "wer"
    lost_runs: int | None = None
    inputs: ResultInputs | None = None
    configuration: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        own = {} if self.inputs is None else {"fingerprint": self.inputs.fingerprint}
        return {**asdict(self), **own}


def measurement_path(folder: Path, stem: str) -> Path:
    return folder / f"{_PREFIX}{stem}.json"


def read_measurement(path: Path) -> Measurement:
    """One file.

    Raises:
        ValueError: it is damaged; the message names it.
    """
    advice = "remove it, and run `pruned-rnnt decode` again"
    values = read_json(path, advice)
    try:
        return from_json(Measurement, values)
    except TypeError as error:
        raise damaged(path, error, advice) from error


def read_measurements(folder: Path, model: str) -> list[Measurement]:
    """The measurements of the model with this fingerprint in a run's folder of results.

    Of those that differ in device, kernels, calibration or version alone, the newest one.

    Raises:
        ValueError: a file is damaged; the message names it.
    """
    newest: dict[str, Measurement] = {}
    for path in sorted(folder.glob(f"{_PREFIX}*.json"), key=lambda path: path.stat().st_mtime):
        found = read_measurement(path)
        key = path.name if found.inputs is None else found.inputs.without_computation
        newest[key] = found
    ordered = sorted(newest.items())
    return [measurement for _, measurement in ordered if measurement.model == model]
