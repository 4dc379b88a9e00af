"""Tables of audio and texts as streams of entries: LJSpeech's metadata.csv, and Common Voice's
folders; see `own_sources.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry
from pruned_rnnt.data.prepare.table_source import TableSource

_CLIPS = "clips"
_SPLITS = ("train", "dev", "test")
_ALL = "validated"
_COLUMNS = {"client_id", "path", "sentence"}
AUDIO_FOLDER = "wavs"
_SUFFIXES = (".wav", ".flac")


@dataclass(frozen=True)
class CommonVoiceSource:
    """The folder of a language: tables next to the folder clips with their audio.

    train.tsv, dev.tsv and test.tsv are the splits. Without them, validated.tsv is read, and names
    no splits.
    """

    folder: Path

    def __iter__(self) -> Iterator[CorpusEntry]:
        tables = {split: self.folder / f"{split}.tsv" for split in _SPLITS}
        if not tables["train"].is_file():
            yield from clips_table(self.folder / f"{_ALL}.tsv")
            return
        for split, table in tables.items():
            for entry in clips_table(table) if table.is_file() else ():
                yield replace(entry, id=f"{split}-{entry.id}", split=split)


@dataclass(frozen=True)
class CommonVoiceFolders:
    """Several languages, one after the other."""

    folders: tuple[Path, ...]

    def __iter__(self) -> Iterator[CorpusEntry]:
        for folder in self.folders:
            yield from CommonVoiceSource(folder)


def common_voice_folders(path: Path) -> tuple[Path, ...]:
    """`path` if it is the folder of a language, else those of its folders that are; may be none."""
    if _is_language(path):
        return (path,)
    return tuple(folder for folder in sorted(path.iterdir()) if _is_language(folder))


def clips_table(path: Path) -> TableSource:
    """The source of one of the tables."""
    return TableSource(path, audio_folder=path.parent / _CLIPS)


def is_clips_table(path: Path) -> bool:
    """True if a file is one of the tables, with the folder of its clips."""
    if not (path.is_file() and (path.parent / _CLIPS).is_dir()):
        return False
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        return set(next(lines, "").rstrip("\r\n").split("\t")) >= _COLUMNS


def _is_language(folder: Path) -> bool:
    return any(is_clips_table(folder / f"{name}.tsv") for name in ("train", _ALL))


@dataclass(frozen=True)
class LJSpeechSource:
    """Lines `id|text` or `id|text|normalised text`; the normalised text is used if there is one.

    The audio of an id is wavs/ID.wav (or .flac) next to the table. Quotation marks belong to the
    text.
    """

    path: Path

    def __iter__(self) -> Iterator[CorpusEntry]:
        folder = self.path.parent / AUDIO_FOLDER
        with self.path.open(encoding="utf-8-sig", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                name, *texts = (cell.strip() for cell in line.split("|"))
                text = next((text for text in reversed(texts[:2]) if text), "")
                problem = "" if texts else "line is not `id|text` or `id|text|normalised text`"
                if not name:
                    problem = "line without an id"
                elif "\ufffd" in text:
                    problem = "text is not UTF-8"
                files = [folder / f"{name}{suffix}" for suffix in _SUFFIXES]
                yield CorpusEntry(
                    id=name.replace("/", "-"),
                    origin=f"{self.path}:{number}",
                    audio=str(next((file for file in files if file.is_file()), files[0])),
                    text=text,
                    problem=problem,
                )


def is_ljspeech_table(path: Path) -> bool:
    """True if `path` is next to a folder wavs and its first line has the format above."""
    if not (path.parent / AUDIO_FOLDER).is_dir():
        return False
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        name, *texts = next((line for line in lines if line.strip()), "").split("|")
    return 1 <= len(texts) <= 2 and not Path(name).suffix and not {",", "\t"} & set(name)
