"""The files in a folder at any depth: listed, or removed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path


def empty_folder(folder: Path) -> None:
    """Remove all that is in a folder; links are removed, not what they lead to."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _raise(error: OSError) -> None:
    raise error


def files_below(
    folder: Path, on_error: Callable[[OSError], None] = _raise
) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder, parents first and siblings sorted, with its files' names in any order.

    Links to folders are followed, after their siblings; each folder is yielded once.

    Args:
        on_error: called with the error of a folder that cannot be listed; by default, it is raised.
    """
    visited: set[tuple[int, int]] = set()
    for parent, folders, names in os.walk(folder, onerror=on_error, followlinks=True):
        status = Path(parent).stat()
        if (status.st_dev, status.st_ino) in visited:
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        # A folder keeps its own name if a link beside it leads to it.
        folders.sort(key=lambda name: (Path(parent, name).is_symlink(), name))
        yield Path(parent), names
