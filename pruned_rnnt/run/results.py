"""The results of `pruned-rnnt decode` in the folder of a run: writes their files, and reads the
error rates with the inputs of each (RUN/results/scores-*).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pruned_rnnt.decode.scoring.error_rates import (
    ErrorCounts,
    Transcript,
    confidence_interval,
    count_errors,
)
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.run.icefall_files import write_icefall_files
from pruned_rnnt.run.result_inputs import ResultInputs
from pruned_rnnt.system.folder_lock import exclusive_folder_lock
from pruned_rnnt.system.json_file import damaged, from_json, read_json, with_nan, without_nan
from pruned_rnnt.system.whole_files import write_lines

_PREFIX = "scores-"
_ALL_SCORES = "scores.json"


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
        values: dict[str, Any] = without_nan({**asdict(self), **own})
        return values


def measurement_path(folder: Path, stem: str) -> Path:
    return folder / f"{_PREFIX}{stem}.json"


def read_measurement(path: Path) -> Measurement:
    """One file.

    Raises:
        ValueError: it is damaged; the message names it.
    """
    advice = "remove it, and run `pruned-rnnt decode` again"
    values = read_json(path, advice)
    for name in ("words", "characters"):
        if isinstance(rate := values.get(name), dict):
            values[name] = with_nan(rate)
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


def save_result(
    run: Path,
    measured: Measurement,
    words: Sequence[Transcript],
    hypotheses: Iterable[Mapping[str, Any]],
    *,
    languages: Sequence[str] = (),
    delays: Sequence[str] = (),
) -> str:
    """Write all files of a result; returns the STEM of their names.

    Only results of the same inputs are replaced. Processes may write into a folder at once.

    Args:
        measured: with its inputs.
        words: the transcripts in words.
        hypotheses: the lines of the n-best file.
        languages, delays: the lines of the table of languages and of the file of delays, which are
            written if there are any.
    """
    folder, inputs = RunFolder(run).results, measured.inputs
    assert inputs is not None
    folder.mkdir(parents=True, exist_ok=True)
    stem = free_stem(folder, inputs)
    counts_words = measured.metric == "wer"
    transcripts = words if counts_words else [transcript.characters() for transcript in words]
    # First the file that takes a whole decoding to write again.
    lines = (json.dumps(line, ensure_ascii=False) for line in hypotheses)
    write_lines(folder / f"nbest-{stem}.jsonl", lines)
    write_icefall_files(folder, stem, inputs.label, transcripts, measured.metric.upper())
    for name, found in ((f"languages-{stem}.tsv", languages), (f"delays-{stem}.jsonl", delays)):
        (folder / name).unlink(missing_ok=True)
        if found:
            write_lines(folder / name, found)
    text = json.dumps(measured.to_dict(), indent=2, ensure_ascii=False)
    write_lines(measurement_path(folder, stem), [text])
    _collect(folder)
    return stem


def free_stem(folder: Path, inputs: ResultInputs) -> str:
    """The STEM of a result: with more digits if other inputs have the first ones."""
    for digits in (8, 16, 64):
        stem = inputs.stem(digits)
        if _stored_fingerprint(measurement_path(folder, stem)) in (None, inputs.fingerprint):
            break
    return stem


def _stored_fingerprint(path: Path) -> str | None:
    """None without a readable file."""
    try:
        return str(read_json(path)["fingerprint"])
    except (OSError, ValueError, KeyError):
        return None


def _collect(folder: Path) -> None:
    """Write scores.json: the list of all measurements, with the names of their files."""
    with exclusive_folder_lock(folder, wait=True):
        found = []
        for path in sorted(folder.glob(measurement_path(folder, "*").name)):
            try:
                # Earlier versions wrote NaN.
                found.append(without_nan({"file": path.name, **read_json(path)}))
            except ValueError:
                continue  # a damaged file; commands that read it name it
        text = json.dumps(found, indent=2, ensure_ascii=False)
        write_lines(folder / _ALL_SCORES, [text])
