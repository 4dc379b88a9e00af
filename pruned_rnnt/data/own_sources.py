"""Four shapes of a user's own data, each read as a stream of entries.

A source is an object that can be iterated any number of times and gives the same entries each
time. Only one entry is in memory at a time, except what a Kaldi directory or a pair of manifests
needs for look-ups.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pruned_rnnt.data.entries import Entry
from pruned_rnnt.data.kaldi_source import KaldiSource
from pruned_rnnt.data.manifest_source import ManifestSource

Kind = Literal["folder", "table", "kaldi", "manifest"]

AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".m4a", ".aac", ".wma", ".webm", ".sph")
_MANIFEST_SUFFIXES = (".jsonl", ".jsonl.gz")
_TABLE_SUFFIXES = (".tsv", ".csv", ".txt")
_COLUMNS = {
    "path": ("path", "audio", "file", "filename", "wav", "audio_path", "audio_filepath"),
    "text": ("text", "sentence", "transcript", "transcription"),
    "speaker": ("speaker", "speaker_id", "client_id", "spk"),
    "split": ("split", "set", "subset"),
}


def open_source(path: Path, supervisions: Path | None = None) -> tuple[Kind, Iterable[Entry]]:
    """The source at `path`, by what it is.

    A directory with `text` and `wav.scp` is Kaldi's; any other directory holds audio with .txt
    files beside; a `.jsonl[.gz]` file is a lhotse manifest of cuts, or of recordings when
    `supervisions` names theirs; any other file is a table.

    Raises:
        FileNotFoundError: nothing at `path`.
        ValueError: a file that is neither; a table without the columns.
    """
    if not path.exists():
        raise FileNotFoundError(f"no data at {path}")
    if supervisions is not None and not supervisions.is_file():
        raise FileNotFoundError(f"no supervisions at {supervisions}")
    if path.is_dir():
        if (path / "wav.scp").is_file() and (path / "text").is_file():
            return "kaldi", KaldiSource(path)
        return "folder", FolderSource(path)
    if path.name.endswith(_MANIFEST_SUFFIXES):
        return "manifest", ManifestSource(path, supervisions)
    if path.suffix.lower() not in _TABLE_SUFFIXES:
        raise ValueError(
            f"{path} is no source: needs a folder, a Kaldi directory, a table "
            f"({', '.join(_TABLE_SUFFIXES)}) or a manifest ({', '.join(_MANIFEST_SUFFIXES)})"
        )
    return "table", TableSource(path)


@dataclass(frozen=True)
class FolderSource:
    """Audio files anywhere below `folder`, the text of each in a .txt file of the same stem.

    A first directory named train, dev or test is the split.
    """

    folder: Path

    def __iter__(self) -> Iterator[Entry]:
        for parent, folders, names in os.walk(self.folder, followlinks=True):
            folders.sort()
            stems: set[str] = set()
            for name in sorted(names):
                path = Path(parent, name)
                if path.suffix.lower() not in AUDIO_SUFFIXES:
                    continue
                relative = path.relative_to(self.folder)
                split = relative.parts[0] if len(relative.parts) > 1 else ""
                text_path = path.with_suffix(".txt")
                text, problem = _read_text(text_path)
                if path.stem in stems:
                    problem = "second audio file of the same stem"
                stems.add(path.stem)
                yield Entry(
                    id=relative.with_suffix("").as_posix().replace("/", "-"),
                    origin=str(text_path),
                    audio=str(path),
                    text=text,
                    split=split if split in ("train", "dev", "test") else "",
                    problem=problem,
                )


def _read_text(path: Path) -> tuple[str, str]:
    try:
        return path.read_text(encoding="utf-8-sig"), ""
    except FileNotFoundError:
        return "", "no text file beside the audio"
    except UnicodeDecodeError:
        return "", "text is not UTF-8"


@dataclass(frozen=True)
class TableSource:
    """Rows of audio path and text, in columns that tabs or (in .csv) commas part.

    The first row may name the columns: path and text, and optionally speaker and split; without
    such a row they are path, text, speaker, split. Relative paths start at the table's folder.
    """

    path: Path

    def __iter__(self) -> Iterator[Entry]:
        root = self.path.parent
        with self.path.open(encoding="utf-8-sig", newline="", errors="replace") as lines:
            rows = self._rows(lines)
            columns: dict[str, int] | None = None
            for line, row in rows:
                if columns is None:
                    columns, is_header = _columns(row, self.path)
                    if is_header:
                        continue
                if not any(cell.strip() for cell in row):
                    continue
                cells = {
                    name: row[index].strip() if index < len(row) else ""
                    for name, index in columns.items()
                }
                yield Entry(
                    id=f"{line:08d}-{Path(cells['path']).stem}",
                    origin=f"{self.path}:{line}",
                    audio=str(root / cells["path"]),
                    text=cells["text"],
                    speaker=cells.get("speaker", ""),
                    split=cells.get("split", ""),
                    problem=_row_problem(row, columns, cells),
                )

    def _rows(self, lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
        if self.path.suffix.lower() == ".csv":
            reader = csv.reader(lines)
            for row in reader:
                yield reader.line_num, row
        else:
            # Quotation marks in a tab-separated file are just characters.
            for number, line in enumerate(lines, 1):
                yield number, line.rstrip("\r\n").split("\t")


def _columns(first: list[str], path: Path) -> tuple[dict[str, int], bool]:
    """Index of each column; whether the first row names them."""
    names = [cell.strip().lower() for cell in first]
    found = {
        column: names.index(alias)
        for column, aliases in _COLUMNS.items()
        for alias in aliases
        if alias in names
    }
    if {"path", "text"} <= found.keys():
        return found, True
    if len(first) < 2:
        kind = "commas" if path.suffix.lower() == ".csv" else "tabs"
        raise ValueError(f"{path}:1: needs path and text parted by {kind}, got {first}")
    return dict(zip(_COLUMNS, range(min(len(first), len(_COLUMNS))), strict=False)), False


def _row_problem(row: list[str], columns: dict[str, int], cells: dict[str, str]) -> str:
    if len(row) <= max(columns["path"], columns["text"]):
        return "row has too few columns"
    if "\ufffd" in cells["text"]:
        return "text is not UTF-8"
    return "" if cells["path"] else "row without a path"
