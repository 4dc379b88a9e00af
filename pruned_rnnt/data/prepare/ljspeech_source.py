"""A table in the format of LJSpeech's metadata.csv as a stream of entries; see `own_sources.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry

AUDIO_FOLDER = "wavs"
_SUFFIXES = (".wav", ".flac")


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
