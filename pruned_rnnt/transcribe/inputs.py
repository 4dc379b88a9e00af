"""The audio files that `pruned-rnnt transcribe` is given: by name, or by the folder they are in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pruned_rnnt.data.audio.audio_file import AUDIO_SUFFIXES
from pruned_rnnt.usage_errors import ExportError


class AudioInput(NamedTuple):
    """A file, and what its transcript is called: its name, or path below its folder, without the
    suffix."""

    path: Path
    name: str


def audio_inputs(arguments: Sequence[str]) -> list[AudioInput]:
    """Files as they are named; of a folder all audio files in it, at any depth, in order.

    Raises:
        ExportError: a folder without audio files.
    """
    return [found for argument in arguments for found in _inputs(Path(argument))]


def _inputs(path: Path) -> Iterator[AudioInput]:
    if not path.is_dir():
        yield AudioInput(path, path.stem)
        return
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in AUDIO_SUFFIXES)
    files = [file for file in files if file.is_file()]
    if not files:
        raise ExportError(
            f"no audio files below {path}: needs files that end in {', '.join(AUDIO_SUFFIXES)}"
        )
    for file in files:
        yield AudioInput(file, file.relative_to(path).with_suffix("").as_posix())
