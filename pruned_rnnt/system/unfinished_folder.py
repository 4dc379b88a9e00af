"""Files that appear in a folder together, or not at all after an error."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp


@contextmanager
def appearing_together(folder: Path, replacing: Sequence[str] = ()) -> Iterator[Path]:
    """Yield an empty folder beside `folder`, whose files move there if there was no error.

    Args:
        replacing: patterns of earlier files in `folder` that are removed then; others stay.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield unfinished
        folder.mkdir(exist_ok=True)
        for pattern in replacing:
            for old in folder.glob(pattern):
                old.unlink()
        for path in unfinished.iterdir():
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
