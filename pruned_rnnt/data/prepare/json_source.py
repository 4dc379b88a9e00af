"""JSON lines of audio paths and texts as a stream of entries; see `own_sources.py`.

NeMo's manifests (audio_filepath, duration, text, optional offset) and the metadata.jsonl of Hugging
Face's audio folders (file_name, transcription) are such files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pruned_rnnt.data.input.manifest_items import text_lines
from pruned_rnnt.data.prepare.entries import Entry
from pruned_rnnt.data.prepare.kaldi_source import from_here_or
from pruned_rnnt.data.prepare.table_source import COLUMNS, split_of_path

_NEMO_PATH = "audio_filepath"


@dataclass(frozen=True)
class JsonSource:
    """Lines of JSON objects with a path and a text, and optionally speaker, split, offset.

    The names are those of a table's columns. offset and duration are in seconds and select a part
    of the file, as NeMo has them: duration counts with `audio_filepath` alone. Relative paths start
    at the file's folder; those of `audio_filepath` start where the program runs if they exist
    there, as with NeMo.

    Raises ValueError naming a line that is no JSON object.
    """

    path: Path

    def __iter__(self) -> Iterator[Entry]:
        for number, line in text_lines(self.path):
            yield self._entry(f"{self.path}:{number}", number, line)

    def _entry(self, origin: str, number: int, line: str) -> Entry:
        item = json_object(line)
        if item is None:
            raise ValueError(f"{origin} is no JSON object: {line.strip()[:100]!r}")
        cells = {column: _first(item, names) for column, names in COLUMNS.items()}
        path = cells["path"]
        start, duration, problem, details = _part(item)
        if not isinstance(path, str) or not path.strip():
            path, problem = "", f"line without a path ({_NEMO_PATH} or file_name)"
        elif not isinstance(cells["text"], str | None):
            problem, details = "text is no string", repr(cells["text"])[:100]
        audio = Path(path).expanduser() if path.startswith("~/") else Path(path)
        folder = self.path.parent
        text = cells["text"] if isinstance(cells["text"], str) else ""
        split = str(cells["split"] or "")
        return Entry(
            id=f"{number:08d}-{audio.stem}",
            origin=origin,
            audio=str(from_here_or(folder, str(audio)) if _NEMO_PATH in item else folder / audio),
            text=text,
            speaker=str(cells["speaker"] if cells["speaker"] is not None else ""),
            split=split or ("" if _NEMO_PATH in item else split_of_path(path)),
            start=start,
            duration=duration,
            problem=problem,
            details=details,
        )


def json_object(line: str) -> dict[str, Any] | None:
    """The object that a line holds; None for anything else."""
    try:
        item = json.loads(line)
    except ValueError:
        return None
    return item if isinstance(item, dict) else None


def names_audio(item: dict[str, Any] | None) -> bool:
    """Whether an object of JSON has a path of audio under one of the names known here."""
    return item is not None and any(name in item for name in COLUMNS["path"])


def _first(item: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((item[name] for name in names if item.get(name) is not None), None)


def _part(item: dict[str, Any]) -> tuple[float, float | None, str, str]:
    """Start and duration in seconds, a problem and its details."""
    values = {"offset": item.get("offset")}
    if _NEMO_PATH in item:
        values["duration"] = item.get("duration")
    for name, value in values.items():
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and 0 <= value < math.inf):
            return 0.0, None, f"{name} is no number of seconds from 0 on", repr(value)[:100]
    return values["offset"] or 0.0, values.get("duration"), "", ""
