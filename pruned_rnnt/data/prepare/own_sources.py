"""Every shape of a user's own data, each read as a stream of entries.

A source is an object that can be iterated any number of times and gives the same entries each
time. Only one entry is in memory at a time, except what a Kaldi directory or a pair of manifests
needs for look-ups.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pruned_rnnt.data.audio.audio_file import AUDIO_SUFFIXES
from pruned_rnnt.data.input.manifest_items import text_lines
from pruned_rnnt.data.prepare.bars_source import BarsSource, is_bars_table
from pruned_rnnt.data.prepare.entries import Entry
from pruned_rnnt.data.prepare.json_source import JsonSource, json_object, names_audio
from pruned_rnnt.data.prepare.kaldi_source import KaldiSource
from pruned_rnnt.data.prepare.manifest_source import ManifestSource
from pruned_rnnt.data.prepare.splits import split_name
from pruned_rnnt.data.prepare.table_source import TableSource

Kind = Literal["folder", "table", "JSON lines", "LJSpeech table", "metadata", "kaldi", "manifest"]

_MANIFEST_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
_TABLE_SUFFIXES = (".tsv", ".csv", ".txt")
# Of Hugging Face's audio folders and of LJSpeech, beside the audio.
_METADATA_NAMES = ("metadata.csv", "metadata.jsonl")


def open_source(
    path: Path,
    supervisions: Path | None = None,
    *,
    data_root: Path | None = None,
    allow_commands: bool = False,
) -> tuple[Kind, Iterable[Entry]]:
    """The source at `path`, by what it is.

    A directory with `text` and `wav.scp` is Kaldi's; one with metadata.csv or metadata.jsonl, or
    with one in folders named like splits, holds what these list; any other directory holds audio
    with .txt files beside. A file of JSON lines is a lhotse manifest of cuts, or of recordings when
    `supervisions` names theirs, unless its first line has a path of audio, as NeMo's manifests
    have. Any other file is a table, LJSpeech's where it looks so and has a folder wavs beside.

    data_root: see TableSource.

    allow_commands: a shell may run the commands which a Kaldi directory or a manifest has instead
        of audio files.

    Raises:
        FileNotFoundError: nothing at `path`.
        ValueError: a file that is neither; a table without the columns.
    """
    if not path.exists():
        raise FileNotFoundError(f"no data at {path}")
    if supervisions is not None and not supervisions.is_file():
        raise FileNotFoundError(f"no supervisions at {supervisions}")
    if data_root is not None and not data_root.is_dir():
        raise FileNotFoundError(f"no folder for --data-root at {data_root}")
    if path.is_dir():
        if (path / "wav.scp").is_file() and (path / "text").is_file():
            return "kaldi", KaldiSource(path, allow_commands)
        listed = _listed_by_metadata(path)
        return ("folder", FolderSource(path)) if listed is None else ("metadata", listed)
    if path.name.endswith(_MANIFEST_SUFFIXES):
        first = next((line for _, line in text_lines(path)), "")
        item = json_object(first)
        if item is None and first:
            raise ValueError(
                f"{path}:1 is no JSON object: needs one on each line, as manifests of NeMo and of "
                f"lhotse have, got {first.strip()[:100]!r}"
            )
        if supervisions is None and names_audio(item):
            return "JSON lines", JsonSource(path)
        return "manifest", ManifestSource(path, supervisions, allow_commands)
    if path.suffix.lower() not in _TABLE_SUFFIXES:
        raise ValueError(
            f"{path} is no source: needs a folder, a Kaldi directory, a table "
            f"({', '.join(_TABLE_SUFFIXES)}) or a manifest ({', '.join(_MANIFEST_SUFFIXES)})"
        )
    if is_bars_table(path):
        return "LJSpeech table", BarsSource(path)
    return "table", TableSource(path, data_root)


def _listed_by_metadata(folder: Path) -> Iterable[Entry] | None:
    """What metadata files list in `folder` or in its folders of splits; None without any."""
    whole = _metadata_source(folder)
    if whole is not None:
        return whole
    named = sorted(child for child in folder.iterdir() if child.name and split_name(child.name))
    parts = {child.name: _metadata_source(child) for child in named if child.is_dir()}
    listed = {split: part for split, part in parts.items() if part is not None}
    return SplitFolders(listed) if listed else None


def _metadata_source(folder: Path) -> Iterable[Entry] | None:
    for name in _METADATA_NAMES:
        path = folder / name
        if not path.is_file():
            continue
        # Other files may have such a name, beside audio with .txt files.
        if path.suffix == ".jsonl":
            first = next((line for _, line in text_lines(path)), "")
            if names_audio(json_object(first)):
                return JsonSource(path)
        elif is_bars_table(path):
            return BarsSource(path)
        elif TableSource(path).names_columns():
            return TableSource(path)
    return None


@dataclass(frozen=True)
class SplitFolders:
    """Sources by the names of their splits."""

    sources: dict[str, Iterable[Entry]]

    def __iter__(self) -> Iterator[Entry]:
        for split, source in self.sources.items():
            for entry in source:
                yield replace(entry, id=f"{split}-{entry.id}", split=entry.split or split)


@dataclass(frozen=True)
class FolderSource:
    """Audio files anywhere below `folder`, the text of each in a .txt file of the same stem.

    A first directory named train, dev or test is the split. Links to folders are followed, but to
    each folder once.

    Raises ValueError when there is no audio.
    """

    folder: Path

    def __iter__(self) -> Iterator[Entry]:
        found = False
        for parent, names in self._folders():
            stems: set[str] = set()
            for name in sorted(names):
                path = Path(parent, name)
                if path.suffix.lower() not in AUDIO_SUFFIXES:
                    continue
                found = True
                relative = path.relative_to(self.folder)
                split = relative.parts[0] if len(relative.parts) > 1 else ""
                text_path = path.with_suffix(".txt")
                text, problem, details = _read_text(text_path)
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
                    details=details,
                )
        if not found:
            raise ValueError(
                f"no audio below {self.folder}: needs files that end in "
                f"{', '.join(AUDIO_SUFFIXES)} (a Kaldi directory needs `wav.scp` and `text`)"
            )

    def _folders(self) -> Iterator[tuple[str, list[str]]]:
        walked: set[tuple[int, int]] = set()
        for parent, folders, names in os.walk(self.folder, followlinks=True):
            status = Path(parent).stat()
            if (status.st_dev, status.st_ino) in walked:
                folders.clear()
                continue
            walked.add((status.st_dev, status.st_ino))
            folders.sort()
            yield parent, names


def _read_text(path: Path) -> tuple[str, str, str]:
    """The text; else what is wrong, and details."""
    try:
        return path.read_text(encoding="utf-8-sig"), "", ""
    except FileNotFoundError:
        return "", "no text file beside the audio", ""
    except UnicodeDecodeError:
        return "", "text is not UTF-8", ""
    except OSError as error:
        return "", "text file cannot be read", error.strerror or ""
