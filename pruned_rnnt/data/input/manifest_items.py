"""Reads lhotse manifests line by line; errors name the file and the line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lhotse.serialization import deserialize_item, open_best

from pruned_rnnt.data.audio.recordings import last_line
from pruned_rnnt.data.input.manifest_checks import check_values, commands_of


def manifest_items(path: Path, allow_commands: bool = False) -> Iterator[tuple[int, Any]]:
    """Yields (line number, object) for a manifest.

    allow_commands: accept audio and features that come from shell commands. The commands run when
        the audio or the features are loaded.

    Raises:
        ValueError: a line is not valid, has an impossible rate or time, or has a command that is
            not allowed. The message names the line.
    """
    for number, line in text_lines(path):
        try:
            values = json.loads(line)
            check_values(values)
            commands = [] if allow_commands else commands_of(values)
            item = None if commands else deserialize_item(values)
        except Exception as error:  # lhotse raises errors of many types
            raise ValueError(
                f"{path}:{number} is not a valid line of a lhotse manifest: {last_line(error)}"
            ) from error
        if commands:
            raise ValueError(
                f"{path}:{number}: reading this recording would run a shell command, "
                f"{commands[0][:100]!r} (the manifest has {_count_commands(path)}). If you trust "
                "all of them, allow them with --allow-commands (prepare) or "
                "data.allow_commands=true (train, decode, align)"
            )
        yield number, item


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
