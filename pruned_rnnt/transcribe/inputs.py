"""The audio files of a `pruned-rnnt transcribe` command: single files and the files of folders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pruned_rnnt.data.audio.audio_file import AUDIO_SUFFIXES
from pruned_rnnt.system.usage_errors import UsageError


class AudioInput(NamedTuple):
    """An audio file and the name of its transcript.

    name: without the suffix: the file's name, or its path below the folder that was searched.
    """

    path: Path
    name: str


def audio_inputs(arguments: Sequence[str]) -> list[AudioInput]:
    """The files named, and the audio files in the folders named, at any depth, sorted by path.

    Raises:
        UsageError: a folder has no audio files.
    """
    return [found for argument in arguments for found in _inputs(Path(argument))]


def _inputs(path: Path) -> Iterator[AudioInput]:
    if not path.is_dir():
        yield AudioInput(path, path.stem)
        return
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in AUDIO_SUFFIXES)
    files = [file for file in files if file.is_file()]
    if not files:
        raise UsageError(
            f"no audio files below {path}: expected files that end in {', '.join(AUDIO_SUFFIXES)}"
        )
    for file in files:
        yield AudioInput(file, file.relative_to(path).with_suffix("").as_posix())
