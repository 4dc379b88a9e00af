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
from typing import Any, Literal

from lhotse.serialization import deserialize_item, load_jsonl
from lhotse.utils import fastcopy

from pruned_rnnt.data.entries import Entry, last_line

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


@dataclass(frozen=True)
class KaldiSource:
    """A Kaldi data directory: wav.scp, text, and where they exist segments and utt2spk.

    wav.scp may hold commands that end in "|". wav.scp, segments and utt2spk are held in memory.
    """

    folder: Path

    def __iter__(self) -> Iterator[Entry]:
        audio = {key: value for _, key, value in _kaldi_lines(self.folder / "wav.scp")}
        speakers = self._optional("utt2spk")
        segments = self._optional("segments")
        for line, name, text in _kaldi_lines(self.folder / "text"):
            recording, start, end, problem = name, 0.0, None, ""
            if segments:
                recording, start, end, problem = _segment(segments.get(name))
            if not problem and recording not in audio:
                problem = "not in wav.scp"
            command = audio.get(recording, "")
            if command and not command.endswith("|"):
                command = str(_from_here_or(self.folder, command))
            yield Entry(
                id=name.replace("/", "-"),
                origin=f"{self.folder / 'text'}:{line}",
                audio=command,
                text=text,
                speaker=speakers.get(name, ""),
                start=start,
                duration=None if end is None else round(end - start, 8),
                problem=problem,
            )

    def _optional(self, name: str) -> dict[str, str]:
        path = self.folder / name
        if not path.is_file():
            return {}
        return {key: value for _, key, value in _kaldi_lines(path)}


def _kaldi_lines(path: Path) -> Iterator[tuple[int, str, str]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            key, _, value = line.strip().partition(" ")
            if "\t" in key:
                key, _, value = line.strip().partition("\t")
            if key:
                yield number, key, value.strip()


def _from_here_or(folder: Path, path: str) -> Path:
    """Relative paths of manifests start where the program runs, or else at the manifest."""
    return Path(path) if Path(path).exists() else folder / path


def _segment(value: str | None) -> tuple[str, float, float | None, str]:
    if value is None:
        return "", 0.0, None, "not in segments"
    try:
        recording, start, end = value.split()[:3]
        # Kaldi writes -1 for the end of the recording.
        return recording, float(start), float(end) if float(end) >= 0 else None, ""
    except ValueError:
        return "", 0.0, None, "line of segments is not `utterance recording start end`"


@dataclass(frozen=True)
class ManifestSource:
    """A lhotse manifest of cuts, or of recordings and supervisions; one entry a supervision.

    Recordings are held in memory when they come apart from their supervisions.
    """

    path: Path
    supervisions: Path | None = None

    def __iter__(self) -> Iterator[Entry]:
        if self.supervisions is None:
            for line, item in _items(self.path):
                yield from _entries_of_cut(item, f"{self.path}:{line}", self.path.parent)
            return
        listed = _items(self.supervisions)
        yield from paired_entries(
            (recording for _, recording in _items(self.path)),
            ((f"{self.supervisions}:{line}", supervision) for line, supervision in listed),
            self.path.parent,
        )


def paired_entries(
    recordings: Iterable[Any], supervisions: Iterable[tuple[str, Any]], folder: Path
) -> Iterator[Entry]:
    """Entries of (origin, supervision) pairs, each with the part of its recording it is about.

    folder: where relative paths start if not where the program runs.
    """
    by_id = {recording.id: recording for recording in recordings}
    for origin, supervision in supervisions:
        recording = by_id.get(supervision.recording_id)
        if recording is None:
            yield Entry(id=supervision.id, origin=origin, problem="recording is not listed")
        else:
            cut = _cut_of_supervision(recording, supervision)
            yield entry_of_cut(_with_paths_found(cut, folder), origin)


def _items(path: Path) -> Iterator[tuple[int, Any]]:
    for line, values in enumerate(load_jsonl(path), 1):
        try:
            item = deserialize_item(values)
        except Exception as error:  # whatever a foreign object makes of it
            raise ValueError(f"{path}:{line} is no lhotse manifest: {last_line(error)}") from error
        yield line, item


def _entries_of_cut(cut: Any, origin: str, folder: Path) -> Iterator[Entry]:
    if not hasattr(cut, "supervisions"):
        raise ValueError(
            f"{origin} is a {type(cut).__name__}: needs cuts, or recordings with --supervisions"
        )
    cut = _with_paths_found(cut, folder)
    if len(cut.supervisions) < 2:
        yield entry_of_cut(cut, origin)
        return
    # A long cut with many supervisions is as many utterances.
    for index, part in enumerate(cut.trim_to_supervisions(keep_overlapping=False)):
        yield entry_of_cut(fastcopy(part, id=f"{cut.id}-{index}"), origin)


def _with_paths_found(cut: Any, folder: Path) -> Any:
    if not getattr(cut, "has_recording", False):
        return cut
    sources = [s for track in getattr(cut, "tracks", [cut]) for s in _sources(track)]
    relative = [s.source for s in sources if s.type == "file" and not Path(s.source).is_absolute()]
    if relative:
        here = Path.cwd() if Path(relative[0]).exists() else folder.absolute()
        cut = cut.with_recording_path_prefix(str(here))
    return cut


def _sources(track: Any) -> list[Any]:
    recording = getattr(getattr(track, "cut", track), "recording", None)
    return recording.sources if recording is not None else []


def entry_of_cut(cut: Any, origin: str) -> Entry:
    """An entry which carries a lhotse cut of one utterance."""
    supervision = cut.supervisions[0] if cut.supervisions else None
    return Entry(
        id=cut.id,
        origin=origin,
        text=(supervision.text or "") if supervision else "",
        speaker=(supervision.speaker or "") if supervision else "",
        cut=cut,
    )


def _cut_of_supervision(recording: Any, supervision: Any) -> Any:
    inside = supervision.trim(recording.duration)
    cut = fastcopy(recording.to_cut(), id=supervision.id, supervisions=[inside])
    if inside.start > 0 or inside.duration < recording.duration - 0.01:
        cut = cut.truncate(offset=inside.start, duration=inside.duration, preserve_id=True)
    return cut
