"""The files in a folder at any depth."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def files_below(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder at any depth, sorted, with the names of its files in any order.

    Links to folders are followed; each folder is yielded once. Raises OSError for a folder that
    cannot be listed.
    """
    visited: set[tuple[int, int]] = set()
    for parent, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        status = Path(parent).stat()
        if (status.st_dev, status.st_ino) in visited:
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        folders.sort()
        yield Path(parent), names


def _raise(error: OSError) -> None:
    raise error
