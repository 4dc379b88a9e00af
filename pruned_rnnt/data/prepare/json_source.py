"""JSON lines of audio paths and texts as a stream of entries; see `own_sources.py`.

NeMo's manifests (audio_filepath, duration, text, optional offset) have this format, and so has the
metadata.jsonl of Hugging Face's audio folders (file_name, transcription).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pruned_rnnt.data.input.manifest_items import text_lines
from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry
from pruned_rnnt.data.prepare.kaldi_source import resolve_path
from pruned_rnnt.data.prepare.table_source import COLUMNS, split_of_path

_NEMO_PATH = "audio_filepath"


@dataclass(frozen=True)
class JsonSource:
    """Lines of JSON objects with a path, a text, and perhaps speaker, split, language, offset.

    The keys have the names of a table's columns. offset and duration, in seconds, select a part of
    the file; duration is used only with `audio_filepath`, as in NeMo. Relative paths start at the
    file's folder; those of `audio_filepath` start at the working directory if they exist there, as
    in NeMo.

    Raises ValueError naming a line that is not a JSON object.
    """

    path: Path

    def __iter__(self) -> Iterator[CorpusEntry]:
        for number, line in text_lines(self.path):
            yield self._entry(f"{self.path}:{number}", number, line)

    def _entry(self, origin: str, number: int, line: str) -> CorpusEntry:
        item = json_object(line)
        if item is None:
            raise ValueError(f"{origin} is not a JSON object: {line.strip()[:100]!r}")
        cells = {column: _first(item, names) for column, names in COLUMNS.items()}
        path = cells["path"]
        start, duration, problem, details = _part(item)
        if not isinstance(path, str) or not path.strip():
            path, problem = "", f"line without a path ({_NEMO_PATH} or file_name)"
        elif not isinstance(cells["text"], str | None):
            problem, details = "text is not a string", repr(cells["text"])[:100]
        audio = Path(path).expanduser() if path.startswith("~/") else Path(path)
        folder = self.path.parent
        text = cells["text"] if isinstance(cells["text"], str) else ""
        split = str(cells["split"] or "")
        return CorpusEntry(
            id=f"{number:08d}-{audio.stem}",
            origin=origin,
            audio=str(resolve_path(folder, str(audio)) if _NEMO_PATH in item else folder / audio),
            text=text,
            speaker=str(cells["speaker"] if cells["speaker"] is not None else ""),
            language=str(cells["language"] if cells["language"] is not None else ""),
            split=split or ("" if _NEMO_PATH in item else split_of_path(path)),
            start=start,
            duration=duration,
            problem=problem,
            details=details,
        )


def json_object(line: str) -> dict[str, Any] | None:
    """The JSON object in a line; None for anything else."""
    try:
        item = json.loads(line)
    except ValueError:
        return None
    return item if isinstance(item, dict) else None


def has_audio_path(item: dict[str, Any] | None) -> bool:
    """True if a JSON object has an audio path under one of the names in `COLUMNS`."""
    return item is not None and any(name in item for name in COLUMNS["path"])


def _first(item: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((item[name] for name in names if item.get(name) is not None), None)


def _part(item: dict[str, Any]) -> tuple[float, float | None, str, str]:
    """Start and duration in seconds, a problem (or ""), and its details."""
    values = {"offset": item.get("offset")}
    if _NEMO_PATH in item:
        values["duration"] = item.get("duration")
    for name, value in values.items():
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and 0 <= value < math.inf):
            return 0.0, None, f"{name} is not a number of seconds >= 0", repr(value)[:100]
    return values["offset"] or 0.0, values.get("duration"), "", ""
