"""Four shapes of a user's own data, each read as a stream of entries.

A source is an object that can be iterated any number of times and gives the same entries each
time. Only one entry is in memory at a time, except what a Kaldi directory or a pair of manifests
needs for look-ups.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pruned_rnnt.data.audio_file import AUDIO_SUFFIXES
from pruned_rnnt.data.entries import Entry
from pruned_rnnt.data.kaldi_source import KaldiSource
from pruned_rnnt.data.manifest_source import ManifestSource
from pruned_rnnt.data.table_source import TableSource

Kind = Literal["folder", "table", "kaldi", "manifest"]

_MANIFEST_SUFFIXES = (".jsonl", ".jsonl.gz")
_TABLE_SUFFIXES = (".tsv", ".csv", ".txt")


def open_source(
    path: Path, supervisions: Path | None = None, allow_commands: bool = False
) -> tuple[Kind, Iterable[Entry]]:
    """The source at `path`, by what it is.

    A directory with `text` and `wav.scp` is Kaldi's; any other directory holds audio with .txt
    files beside; a `.jsonl[.gz]` file is a lhotse manifest of cuts, or of recordings when
    `supervisions` names theirs; any other file is a table.

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
    if path.is_dir():
        if (path / "wav.scp").is_file() and (path / "text").is_file():
            return "kaldi", KaldiSource(path, allow_commands)
        return "folder", FolderSource(path)
    if path.name.endswith(_MANIFEST_SUFFIXES):
        return "manifest", ManifestSource(path, supervisions, allow_commands)
    if path.suffix.lower() not in _TABLE_SUFFIXES:
        raise ValueError(
            f"{path} is no source: needs a folder, a Kaldi directory, a table "
            f"({', '.join(_TABLE_SUFFIXES)}) or a manifest ({', '.join(_MANIFEST_SUFFIXES)})"
        )
    return "table", TableSource(path)


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
