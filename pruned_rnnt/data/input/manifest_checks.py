"""Checks a line of a lhotse manifest before lhotse deserialises it.

A manifest may come from an untrusted source. lhotse accepts any value for a sampling rate or a
time, and passes some sources of audio and features to a shell. An utterance id appears in result
files, a line each, and on terminals, where a line break in it would write lines of its own.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator
from typing import Any

from pruned_rnnt.data.audio.recordings import runs_shell

# Control characters, surrogates, separators of lines and paragraphs.
_REFUSED = {"Cc", "Cs", "Zl", "Zp"}
# They change the direction of the text that follows.
_DIRECTIONS = {
    *("\u061c", "\u200e", "\u200f"),
    *(chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))),
}


def id_fault(name: Any) -> str:
    """Why `name` cannot be the id of an utterance; empty if it can."""
    if not isinstance(name, str) or not name:
        return "is not a text"
    if not name.isascii() or not name.isprintable():
        for character in name:
            if unicodedata.category(character) in _REFUSED or character in _DIRECTIONS:
                return f"contains the control character {character!a}"
    return ""


# lhotse opens paths with this prefix through a shell.
_PIPE = "pipe:"
_PATHS = ("source", "storage_path", "storage_key")
_TIMES = ("start", "duration")
_COUNTS = ("sampling_rate", "num_frames", "num_features")


def check_values(item: Any) -> None:
    """Checks the ids, sampling rates, times and sizes in a parsed line of a manifest.

    Raises:
        ValueError: naming the key, its value and the values allowed.
    """
    for part in _parts(item):
        # The id of a recording may be a path.
        if "id" in part and "sources" not in part and (fault := id_fault(part["id"])):
            raise ValueError(f"the id {_shown(part['id'])} {fault}")
        for key in _COUNTS:
            if key in part and not (_is_number(part[key]) and part[key] >= 1):
                raise ValueError(f"{key} must be a number of at least 1, got {_shown(part[key])}")
        for key in _TIMES:
            if key in part and not _is_number(part[key]):
                raise ValueError(f"{key} must be a number of seconds, got {_shown(part[key])}")
        if part.get("duration", 0) < 0:
            raise ValueError(f"duration must not be negative, got {part['duration']}")


def commands_of(item: Any) -> list[str]:
    """The commands that lhotse would pass to a shell for the audio or features of a line."""
    return [command for part in _parts(item) if (command := _command(part))]


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


def _parts(item: Any) -> Iterator[dict[str, Any]]:
    """All JSON objects in an item, except in `custom` and `alignment`, which are not used here."""
    if isinstance(item, dict):
        yield item
        for key, value in item.items():
            if key not in ("custom", "alignment"):
                yield from _parts(value)
    elif isinstance(item, list):
        for value in item:
            yield from _parts(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: Any) -> str:
    return ascii(value)[:80]
