"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a text file under another name, then rename it; `lines` without line ends.

    A reader sees the old file or the new one, also if this process ends in between.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for line in lines:
                file.write(f"{line}\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
