"""Reads lhotse manifests line by line; errors name the file and the line.

A line is checked before lhotse deserialises it, because a manifest may come from an untrusted
source. lhotse accepts any value for a sampling rate or a time, and passes some sources of audio and
features to a shell. An utterance id appears in result files, a line each, and on terminals, where a
line break in it would write lines of its own.
"""

from __future__ import annotations

import gzip
import json
import math
import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lhotse.serialization import deserialize_item, open_best

from pruned_rnnt.data.audio.recordings import last_line, runs_shell

# Control characters, surrogates, separators of lines and paragraphs.
_REFUSED = {"Cc", "Cs", "Zl", "Zp"}
# They change the direction of the text that follows.
_DIRECTIONS = {
    *("\u061c", "\u200e", "\u200f"),
    *(chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))),
}
# lhotse opens paths with this prefix through a shell.
_PIPE = "pipe:"
_PATHS = ("source", "storage_path", "storage_key")
_TIMES = ("start", "duration")
_COUNTS = ("sampling_rate", "num_frames", "num_features")
_NAMES = ("speaker", "language")
# Manifests of which `spread_lines` reads every line: some seconds.
_MOST_MANIFESTS = 1000
# Seconds by which a supervision may begin before its recording or end after it, and an alignment's
# item before or after its utterance.
MOST_OUTSIDE = 0.05


def id_fault(name: Any) -> str:
    """Why `name` cannot be the id of an utterance; empty if it can."""
    if not isinstance(name, str) or not name:
        return "is not a text"
    if not name.isascii() or not name.isprintable():
        for character in name:
            if unicodedata.category(character) in _REFUSED or character in _DIRECTIONS:
                return f"contains the control character {character!a}"
    return ""


def _check_values(parts: Sequence[dict[str, Any]]) -> None:
    """Checks the ids, rates, times, sizes and texts in the objects of a line of a manifest.

    Whole numbers such as 16000.0 become integers, which resampling needs. Speakers and languages
    become texts, or None for NaN, which programs write for an empty cell of a table.

    Raises:
        ValueError: naming the key, its value and the values allowed.
    """
    for part in parts:
        # The id of a recording may be a path.
        if "id" in part and "sources" not in part and (fault := id_fault(part["id"])):
            raise ValueError(f"the id {_shown(part['id'])} {fault}")
        for key in _COUNTS:
            if key in part:
                value = part[key]
                if not (_is_number(value) and value >= 1 and value == int(value)):
                    raise ValueError(
                        f"{key} must be a whole number of at least 1, got {_shown(value)}"
                    )
                part[key] = int(value)
        for key in _NAMES:
            name = part.get(key)
            if not isinstance(name, str | None):
                part[key] = None if name != name else str(name)
        if not isinstance(part.get("text"), str | None):
            raise ValueError(f"text must be a text, got {_shown(part['text'])}")
        for key in _TIMES:
            if key in part and not _is_number(part[key]):
                raise ValueError(f"{key} must be a number of seconds, got {_shown(part[key])}")
        if part.get("duration", 0) < 0:
            raise ValueError(f"duration must not be negative, got {part['duration']}")


def _commands(parts: Sequence[dict[str, Any]]) -> list[str]:
    """The commands that lhotse would pass to a shell for the audio or features of a line."""
    return [command for part in parts if (command := _command(part))]


def _command(part: dict[str, Any]) -> str:
    if part.get("type") == "command":
        return str(part.get("source"))
    for key in _PATHS:
        path = part.get(key)
        if isinstance(path, str) and (path.startswith(_PIPE) or path.rstrip().endswith("|")):
            return path
    source = part.get("source")
    if isinstance(source, str) and part.get("type") == "file" and runs_shell(source):
        return source
    return ""


def _parts(item: Any) -> list[dict[str, Any]]:
    """All JSON objects in an item, except in `custom` and `alignment`, which are not used here."""
    values: Iterable[Any] = item if isinstance(item, list) else ()
    found = []
    if isinstance(item, dict):
        found.append(item)
        values = [value for key, value in item.items() if key not in ("custom", "alignment")]
    for value in values:
        if isinstance(value, dict | list):
            found += _parts(value)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: Any) -> str:
    return ascii(value)[:80]


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
        parts = _parts(values)
        _check_values(parts)
        commands = [] if allow_commands else _commands(parts)
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

    Raises ValueError naming the last good line if the file is damaged, or the first line that is
    not UTF-8.
    """
    number = 0
    try:
        with open_best(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}:{number} is not UTF-8: save the file as UTF-8") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged after line {number}: {last_line(error)}") from error


def _count_commands(path: Path) -> int:
    """The number of different commands in the readable lines of a manifest."""
    found: set[str] = set()
    with suppress(ValueError):
        for _, line in text_lines(path):
            with suppress(ValueError):
                found.update(_commands(_parts(json.loads(line))))
    return len(found)
