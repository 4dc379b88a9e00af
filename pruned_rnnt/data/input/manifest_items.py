"""Reads lhotse manifests line by line; errors name the file and the line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lhotse.serialization import deserialize_item, open_best

from pruned_rnnt.data.audio.recordings import last_line
from pruned_rnnt.data.input.manifest_checks import check_values, commands_of

# Manifests of which `spread_lines` reads every line: some seconds.
_MOST_MANIFESTS = 1000


class ManifestLine(NamedTuple):
    path: Path
    number: int
    text: str


def manifest_items(path: Path, allow_commands: bool = False) -> Iterator[tuple[int, Any]]:
    """Yields (line number, object) for a manifest; `allow_commands` and errors as `item_of`."""
    for number, text in text_lines(path):
        yield number, item_of(ManifestLine(path, number, text), allow_commands)


def item_of(line: ManifestLine, allow_commands: bool = False) -> Any:
    """The object of a line.

    allow_commands: accept audio and features that come from shell commands. The commands run when
        the audio or the features are loaded.

    Raises:
        ValueError: the line is not valid, has an impossible id, rate or time, or has a command that
            is not allowed. The message names the line.
    """
    path, number, text = line
    try:
        values = json.loads(text)
        check_values(values)
        commands = [] if allow_commands else commands_of(values)
        if not commands:
            return deserialize_item(values)
    except Exception as error:  # lhotse raises errors of many types
        raise ValueError(
            f"{path}:{number} is not a valid line of a lhotse manifest: {last_line(error)}"
        ) from error
    raise ValueError(
        f"{path}:{number}: reading this recording would run a shell command, "
        f"{commands[0][:100]!r} (the manifest has {_count_commands(path)}). If you trust "
        "all of them, allow them with --allow-commands (prepare) or "
        "data.allow_commands=true (train, decode, align)"
    )


def spread_lines(manifests: Sequence[Path], most: int) -> list[ManifestLine]:
    """Lines at equal distances over all manifests, up to twice `most`, or all if they are fewer.

    Of a large number of manifests, some at equal distances are read.
    """
    kept: list[ManifestLine] = []
    distance, count = 1, 0
    for path in manifests[:: -(-len(manifests) // _MOST_MANIFESTS)]:
        for number, text in text_lines(path):
            if count % distance == 0:
                kept.append(ManifestLine(path, number, text))
            count += 1
            if len(kept) > 2 * most:
                kept, distance = kept[::2], 2 * distance
    return kept


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (number, line) for the lines of a file, gzipped or not, that are not blank.

    Raises ValueError naming the last good line if the file is damaged.
    """
    number = 0
    try:
        with open_best(path) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged after line {number}: {last_line(error)}") from error


def _count_commands(path: Path) -> int:
    """The number of different commands in the readable lines of a manifest."""
    found: set[str] = set()
    with suppress(ValueError):
        for _, line in text_lines(path):
            with suppress(ValueError):
                found.update(commands_of(json.loads(line)))
    return len(found)
