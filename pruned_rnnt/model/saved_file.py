"""Reading files of torch.save that somebody else may have made, or a disk have damaged."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

_ZIP_START = b"PK\x03\x04"
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


class UnusableFileError(ValueError):
    """A file that cannot be read; the message names it and says why, in one line."""


def read_saved(path: Path, kind: str) -> Any:
    """What torch.save wrote, as CPU tensors and plain values; no code of the file is run.

    Args:
        path: an existing file.
        kind: what the file should be, for the message, e.g. "checkpoint".

    Raises:
        UnusableFileError: a truncated, damaged or foreign file, or one that holds code.
        OSError: the file cannot be opened.
    """
    with path.open("rb") as file:
        start = file.read(len(_ZIP_START))
    if not start:
        raise UnusableFileError(f"{path} is empty")
    if start != _ZIP_START:
        raise UnusableFileError(f"{path} is damaged, or no {kind}")
    try:
        # torch writes checksums, but does not look at them.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is None:
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # The checksums are right: the file is what somebody wrote.
        raise UnusableFileError(
            f"{path} is refused: it holds {objects_in(error)}, which can run code when it is read; "
            f"a {kind} has tensors and plain values only"
        ) from error
    # A damaged archive makes readers fail in any way: zlib, struct, unicode and key errors, sizes
    # beyond memory, features of zip that nobody uses.
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnusableFileError(f"{path} is truncated or damaged ({reason})") from error
    raise UnusableFileError(f"{path} is damaged: the checksum of {damaged} is wrong")


def objects_in(error: Exception) -> str:
    """What torch refused to read: torch's own message advises to read it nevertheless."""
    found = _GLOBAL.search(str(error))
    return f"an object of {found.group(1)}" if found else "an object that is no tensor"


def check_contents(
    values: Mapping[str, Any], path: Path, version: int, needed: Iterable[str]
) -> None:
    """Refuse contents that this program cannot work with.

    Args:
        values: of the file at `path`.
        version: the newest that this program reads.
        needed: keys that have to be there besides `version` and `config`.

    Raises:
        UnusableFileError: a key is missing, or the file is of a newer version.
    """
    missing = [name for name in ("version", "config", *needed) if name not in values]
    if missing:
        raise UnusableFileError(f"{path} is damaged: it has no {', '.join(map(repr, missing))}")
    if not isinstance(values["version"], int) or not isinstance(values["config"], dict):
        raise UnusableFileError(f"{path} is damaged: 'version' or 'config' has another type")
    if values["version"] > version:
        raise UnusableFileError(
            f"{path} has version {values['version']}, this program reads up to {version}"
        )
