"""What is checked in a line of a lhotse manifest before lhotse makes an object of it.

A manifest may come from anywhere. lhotse takes any value for a sampling rate or a time, and hands
some sources of audio and features to a shell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from pruned_rnnt.data.audio.recordings import runs_shell

# What lhotse opens through a shell, when a path begins so.
_PIPE = "pipe:"
_PATHS = ("source", "storage_path", "storage_key")
_TIMES = ("start", "duration")
_COUNTS = ("sampling_rate", "num_frames", "num_features")


def check_values(item: Any) -> None:
    """Sampling rates, times and sizes of a manifest's line, which JSON has parsed.

    Raises:
        ValueError: naming the key, what it has and what it needs.
    """
    for part in _parts(item):
        for key in _COUNTS:
            if key in part and not (_is_number(part[key]) and part[key] >= 1):
                raise ValueError(f"{key} is {_shown(part[key])}, needs a number of at least 1")
        for key in _TIMES:
            if key in part and not _is_number(part[key]):
                raise ValueError(f"{key} is {_shown(part[key])}, needs a number of seconds")
        if part.get("duration", 0) < 0:
            raise ValueError(f"duration is {part['duration']}, needs seconds that are not negative")


def commands_of(item: Any) -> list[str]:
    """What lhotse would give to a shell for the audio or the features of a manifest's line."""
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
    """All objects of an item; a user's own fields, which nothing here reads, are left out."""
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
    return repr(value)[:80]
