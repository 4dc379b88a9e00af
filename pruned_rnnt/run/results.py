"""Writes the results of `pruned-rnnt decode` into the folder of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pruned_rnnt.decode.scoring.wer import Transcript
from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.run.icefall_files import write_icefall_files
from pruned_rnnt.run.measured import Measurement, measurement_path
from pruned_rnnt.run.result_inputs import ResultInputs
from pruned_rnnt.system.folder_lock import exclusive_folder_lock
from pruned_rnnt.system.json_file import read_json
from pruned_rnnt.system.whole_files import write_lines

_ALL_SCORES = "scores.json"


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
    write_icefall_files(folder, stem, inputs.label, transcripts, measured.metric.upper())
    lines = (json.dumps(line, ensure_ascii=False) for line in hypotheses)
    write_lines(folder / f"nbest-{stem}.jsonl", lines)
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
                found.append({"file": path.name, **read_json(path)})
            except ValueError:
                continue  # a damaged file; commands that read it name it
        text = json.dumps(found, indent=2, ensure_ascii=False)
        write_lines(folder / _ALL_SCORES, [text])
