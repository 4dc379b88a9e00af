"""Opens a user's own data, in any of several formats, as a stream of entries.

A source can be iterated any number of times and yields the same entries each time. It holds one
entry in memory at a time, and the look-up tables of a Kaldi directory or a pair of manifests.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pruned_rnnt.data.audio.audio_file import AUDIO_SUFFIXES
from pruned_rnnt.data.input.manifest_items import text_lines
from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry
from pruned_rnnt.data.prepare.splits import split_name
from pruned_rnnt.data.prepare.table_source import TableSource, split_of_path
from pruned_rnnt.data.prepare.toolkit_sources import (
    JsonSource,
    KaldiSource,
    ManifestSource,
    has_audio_path,
    json_object,
)
from pruned_rnnt.system.folders import files_below

logger = logging.getLogger(__name__)

Kind = Literal[
    "folder",
    "table",
    "JSON lines",
    "LJSpeech table",
    "Common Voice",
    "metadata",
    "kaldi",
    "manifest",
]

_MANIFEST_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
_TABLE_SUFFIXES = (".tsv", ".csv", ".txt")
# Files that list the audio in a folder, in the formats of Hugging Face and of LJSpeech.
_METADATA_NAMES = ("metadata.csv", "metadata.jsonl")
# Common Voice's folder of audio, tables of splits, table without splits, and columns.
_CLIPS = "clips"
_COMMON_VOICE_SPLITS = ("train", "dev", "test")
_VALIDATED = "validated"
_COMMON_VOICE_COLUMNS = {"client_id", "path", "sentence"}
_LJSPEECH_AUDIO = "wavs"
_LJSPEECH_SUFFIXES = (".wav", ".flac")


def open_source(
    path: Path,
    supervisions: Path | None = None,
    *,
    data_root: Path | None = None,
    allow_commands: bool = False,
) -> tuple[Kind, Iterable[CorpusEntry]]:
    """Detects the format of the data at `path` and returns its name and its source.

    A directory with `text` and `wav.scp` is a Kaldi directory. One with Common Voice's train.tsv or
    validated.tsv next to clips/, or with such directories of several languages, has its layout. A
    directory with metadata.csv or metadata.jsonl, or with subfolders named like splits that contain
    one, has the audio that these list. Any other directory is searched for audio files, each with a
    .txt file of the same name. A file of JSON lines is a NeMo manifest if its first line has an
    audio path. Otherwise it is a lhotse manifest of cuts, or of recordings if `supervisions` is
    given. Any other file is a table; it is in LJSpeech's format if the first line fits and there is
    a folder wavs next to it, and one of Common Voice's if there is a folder clips.

    Args:
        data_root: see `TableSource`.
        allow_commands: allow a shell to run commands that a Kaldi directory or a manifest contains
            instead of audio files.

    Raises:
        FileNotFoundError: there is nothing at `path`, `supervisions` or `data_root`.
        ValueError: the format is unknown, a table lacks the columns, or only some of the folders of
            splits or of languages have a table that can be read.
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
        languages = common_voice_folders(path)
        if languages:
            return "Common Voice", CommonVoiceFolders(languages)
        listed = _listed_by_metadata(path)
        return ("folder", FolderSource(path)) if listed is None else ("metadata", listed)
    if path.name.endswith(_MANIFEST_SUFFIXES):
        first = next((line for _, line in text_lines(path)), "")
        item = json_object(first)
        if (item is None and first) or (
            item and all(isinstance(value, dict) for value in item.values())
        ):
            raise ValueError(
                f"{path}:1 is not the JSON object of one utterance or recording: each line needs "
                f"one, as in manifests of NeMo and of lhotse, got {first.strip()[:100]!r}. If the "
                "whole file is one object or list, as SpeechBrain's JSON is, convert it: to "
                "SpeechBrain's csv, or to lines with audio_filepath, text and duration"
            )
        if supervisions is None and has_audio_path(item):
            return "JSON lines", JsonSource(path)
        return "manifest", ManifestSource(path, supervisions, allow_commands)
    if path.suffix.lower() not in _TABLE_SUFFIXES:
        raise ValueError(
            f"{path} has an unknown format: needs a folder, a Kaldi directory, a table "
            f"({', '.join(_TABLE_SUFFIXES)}) or a manifest ({', '.join(_MANIFEST_SUFFIXES)})"
        )
    if _is_ljspeech_table(path):
        return "LJSpeech table", _LJSpeechSource(path)
    if _is_clips_table(path):
        return "Common Voice", _clips_table(path)
    return "table", TableSource(path, data_root)


def unread_columns(source: Iterable[CorpusEntry]) -> list[str]:
    """What `TableSource.unread_columns` says of each table of a source that differs.

    Common Voice's tables are left out, because their other columns are known.
    """
    if isinstance(source, _SplitFolders):
        said = [line for each in source.sources.values() for line in unread_columns(each)]
        return list(dict.fromkeys(said))
    table = source.source if isinstance(source, _ListedFolder) else source
    if not isinstance(table, TableSource) or _is_clips_table(table.path):
        return []
    return list(filter(None, [table.unread_columns()]))


def _listed_by_metadata(folder: Path) -> Iterable[CorpusEntry] | None:
    """The source of the metadata files in `folder` or in its split folders; None without any."""
    whole = _metadata_source(folder)
    if whole is not None:
        return whole
    named = sorted(child for child in folder.iterdir() if child.name and split_name(child.name))
    parts = {child: _metadata_source(child) for child in named if child.is_dir()}
    listed = {child.name: part for child, part in parts.items() if part is not None}
    for child, part in parts.items():
        # A name of two letters may be that of a language.
        if not listed or part is not None or len(child.name) == 2 or not _has_audio(child):
            continue
        problem = (
            f"{child} has audio, but no {' or '.join(_METADATA_NAMES)} that lists it by path and "
            "text, as other splits have"
        )
        if split_name(child.name) != "test":
            raise ValueError(f"{problem}: add one, or move the folder elsewhere")
        # The test set of a competition has no texts.
        logger.warning("%s: it is left out", problem)
    return _SplitFolders(listed) if listed else None


def _has_audio(folder: Path) -> bool:
    return any(path.suffix.lower() in AUDIO_SUFFIXES for path in folder.rglob("*"))


def _metadata_source(folder: Path) -> Iterable[CorpusEntry] | None:
    for name in _METADATA_NAMES:
        path = folder / name
        if not path.is_file():
            continue
        # A file of this name without a header may have nothing to do with the audio.
        if path.suffix == ".jsonl":
            first = next((line for _, line in text_lines(path)), "")
            if has_audio_path(json_object(first)):
                return _ListedFolder(folder, name, JsonSource(path))
        elif _is_ljspeech_table(path):
            return _ListedFolder(folder, name, _LJSpeechSource(path))
        elif TableSource(path).has_header():
            return _ListedFolder(folder, name, TableSource(path))
    return None


@dataclass(frozen=True)
class _ListedFolder:
    """The entries of the file `name` in a folder; audio that it does not list has a problem.

    Memory holds the paths that are listed.
    """

    folder: Path
    name: str
    source: Iterable[CorpusEntry]

    def __iter__(self) -> Iterator[CorpusEntry]:
        listed: set[str] = set()
        for entry in self.source:
            listed.add(os.path.realpath(entry.audio))
            yield entry
        for parent, names in files_below(self.folder):
            for path in sorted(parent / name for name in names):
                is_audio = path.suffix.lower() in AUDIO_SUFFIXES
                if is_audio and os.path.realpath(path) not in listed:
                    yield CorpusEntry(
                        id=path.relative_to(self.folder).as_posix().replace("/", "-"),
                        origin=str(path),
                        problem=f"audio file that {self.name} does not list",
                    )


@dataclass(frozen=True)
class _SplitFolders:
    """The sources of several splits, by the name of the split."""

    sources: dict[str, Iterable[CorpusEntry]]

    def __iter__(self) -> Iterator[CorpusEntry]:
        for split, source in self.sources.items():
            for entry in source:
                yield replace(entry, id=f"{split}-{entry.id}", split=entry.split or split)


@dataclass(frozen=True)
class FolderSource:
    """Audio files at any depth below `folder`, the text of each in a .txt file of the same stem.

    A top-level folder with the name of a split is one, unless the name has two letters, as those of
    languages. Links to folders are followed; each folder is read once. A text file without audio is
    an entry with a problem.

    Raises ValueError if there is no audio.
    """

    folder: Path

    def __iter__(self) -> Iterator[CorpusEntry]:
        found = False
        for parent, names in files_below(self.folder):
            stems: set[str] = set()
            texts: dict[str, Path] = {}
            others: dict[str, str] = {}
            for name in sorted(names):
                path = Path(parent, name)
                if path.suffix.lower() == ".txt":
                    texts[path.stem] = path
                elif path.suffix.lower() not in AUDIO_SUFFIXES:
                    others[path.stem] = name
            for name in sorted(names):
                path = Path(parent, name)
                if path.suffix.lower() not in AUDIO_SUFFIXES:
                    continue
                found = True
                relative = path.relative_to(self.folder)
                split = split_of_path(relative.as_posix())
                text_path = texts.get(path.stem, path.with_suffix(".txt"))
                text, problem, details = _read_text(text_path)
                text = _without_name(text, path.stem)
                if path.stem in stems:
                    problem = "second audio file of the same stem"
                stems.add(path.stem)
                yield CorpusEntry(
                    id=relative.with_suffix("").as_posix().replace("/", "-"),
                    origin=str(text_path),
                    audio=str(path),
                    text=text,
                    split=split if len(split) > 2 else "",
                    problem=problem,
                    details=details,
                )
            for stem in sorted(texts.keys() - stems):
                details = f"{others[stem]} has another suffix" if stem in others else ""
                yield self._text_without_audio(texts[stem], details)
        if not found:
            raise ValueError(
                f"no audio files below {self.folder}: needs files with the suffix "
                f"{', '.join(AUDIO_SUFFIXES)} (a Kaldi directory needs `wav.scp` and `text`)"
            )

    def _text_without_audio(self, path: Path, details: str) -> CorpusEntry:
        # With the suffix, it is the id of no audio.
        name = path.relative_to(self.folder).as_posix().replace("/", "-")
        problem = "text file without an audio file of the same name"
        return CorpusEntry(id=name, origin=str(path), problem=problem, details=details)

    def other_id(self, entry: CorpusEntry) -> str:
        """An id for an entry whose path gives the id of another one, as sub/a.wav and sub-a.wav."""
        name = Path(entry.audio).relative_to(self.folder).as_posix()
        return f"{entry.id}-{hashlib.blake2b(os.fsencode(name), digest_size=4).hexdigest()}"


def _without_name(text: str, stem: str) -> str:
    """The text of a file that `pruned-rnnt transcribe --output` wrote, whose first line begins with
    the path of the audio, of any format, and a tab, and may be followed by times; other texts as
    they are."""
    before, tab, rest = text.partition("\t")
    audio = Path(before)
    is_transcript = tab and audio.suffix.lower() in AUDIO_SUFFIXES and audio.stem == stem
    return rest.partition("\n")[0] if is_transcript else text


def _read_text(path: Path) -> tuple[str, str, str]:
    """The text, a problem (or ""), and its details."""
    try:
        return path.read_text(encoding="utf-8-sig"), "", ""
    except FileNotFoundError:
        return "", "no text file next to the audio", ""
    except UnicodeDecodeError:
        return "", "text is not UTF-8", ""
    except OSError as error:
        return "", "text file cannot be read", error.strerror or ""


@dataclass(frozen=True)
class _CommonVoiceSource:
    """The folder of a language: tables next to the folder clips with their audio.

    train.tsv, dev.tsv and test.tsv are the splits. Without train.tsv, validated.tsv is read, which
    has the clips of dev.tsv and test.tsv too: the others are train, or have no split if there are
    neither. The paths of dev.tsv and test.tsv are then held in memory.
    """

    folder: Path

    def __iter__(self) -> Iterator[CorpusEntry]:
        tables = {split: self.folder / f"{split}.tsv" for split in _COMMON_VOICE_SPLITS}
        tables = {split: table for split, table in tables.items() if table.is_file()}
        validated: Iterable[CorpusEntry] = ()
        if "train" not in tables:
            validated = _clips_table(self.folder / f"{_VALIDATED}.tsv")
        seen: set[str] = set()
        for split, table in tables.items():
            for entry in _clips_table(table):
                if validated:
                    seen.add(entry.audio)
                yield replace(entry, id=f"{split}-{entry.id}", split=split)
        for entry in validated:
            if not tables:
                yield entry
            elif entry.audio not in seen:
                yield replace(entry, id=f"train-{entry.id}", split="train")


@dataclass(frozen=True)
class CommonVoiceFolders:
    """Several languages, one after the other."""

    folders: tuple[Path, ...]

    def __iter__(self) -> Iterator[CorpusEntry]:
        for folder in self.folders:
            yield from _CommonVoiceSource(folder)


def common_voice_folders(path: Path) -> tuple[Path, ...]:
    """`path` if it is the folder of a language, else those of its folders that are; may be none.

    Raises ValueError if only some of the folders with clips are languages.
    """
    if _is_language(path):
        return (path,)
    with_clips = [folder for folder in sorted(path.iterdir()) if (folder / _CLIPS).is_dir()]
    found = tuple(filter(_is_language, with_clips))
    others = [str(folder) for folder in with_clips if folder not in found]
    if found and others:
        raise ValueError(
            f"{', '.join(others[:3])}{' ...' * (len(others) > 3)} next to languages of Common "
            f"Voice: needs train.tsv or {_VALIDATED}.tsv with tabs between the columns "
            f"{', '.join(sorted(_COMMON_VOICE_COLUMNS))}, as next to other {_CLIPS}; add it, or "
            "move the folder elsewhere"
        )
    return found


def _clips_table(path: Path) -> TableSource:
    """The source of one of the tables."""
    return TableSource(path, audio_folder=path.parent / _CLIPS)


def _is_clips_table(path: Path) -> bool:
    """True if a file is one of the tables, with the folder of its clips."""
    if not (path.is_file() and (path.parent / _CLIPS).is_dir()):
        return False
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        return set(next(lines, "").rstrip("\r\n").split("\t")) >= _COMMON_VOICE_COLUMNS


def _is_language(folder: Path) -> bool:
    return any(_is_clips_table(folder / f"{name}.tsv") for name in ("train", _VALIDATED))


@dataclass(frozen=True)
class _LJSpeechSource:
    """Lines `id|text` or `id|text|normalised text`; the normalised text is used if there is one.

    The audio of an id is wavs/ID.wav (or .flac) next to the table. Quotation marks belong to the
    text.
    """

    path: Path

    def __iter__(self) -> Iterator[CorpusEntry]:
        folder = self.path.parent / _LJSPEECH_AUDIO
        with self.path.open(encoding="utf-8-sig", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                name, *texts = (cell.strip() for cell in line.split("|"))
                text = next((text for text in reversed(texts[:2]) if text), "")
                problem = ""
                if not texts or any(texts[2:]):
                    problem = "line is not `id|text` or `id|text|normalised text`"
                if not name:
                    problem = "line without an id"
                elif "\ufffd" in text:
                    problem = "text is not UTF-8"
                files = [folder / f"{name}{suffix}" for suffix in _LJSPEECH_SUFFIXES]
                yield CorpusEntry(
                    id=name.replace("/", "-"),
                    origin=f"{self.path}:{number}",
                    audio=str(next((file for file in files if file.is_file()), files[0])),
                    text=text,
                    problem=problem,
                )


def _is_ljspeech_table(path: Path) -> bool:
    """True if `path` is next to a folder wavs and its first line has the format above."""
    if not (path.parent / _LJSPEECH_AUDIO).is_dir():
        return False
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        name, *texts = next((line for line in lines if line.strip()), "").split("|")
    return 1 <= len(texts) <= 2 and not Path(name).suffix and not {",", "\t"} & set(name)
