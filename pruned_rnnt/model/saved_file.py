"""Read files of torch.save that may be damaged or come from an untrusted source."""

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
    """A file that cannot be used; the message is one line with its path and the reason."""


def read_saved(path: Path, kind: str, *, mapped: bool = False) -> Any:
    """Read CPU tensors and plain values that torch.save wrote, without running code of the file.

    Args:
        path: an existing file.
        kind: the expected kind of file for error messages, for example "checkpoint".
        mapped: tensors are views of the file, for a caller who copies them at once: the file must
            not change until then.

    Raises:
        UnusableFileError: the file is truncated, damaged, of another kind, or holds code.
        OSError: the file cannot be opened.
    """
    with path.open("rb") as file:
        start = file.read(len(_ZIP_START))
    if not start:
        raise UnusableFileError(f"{path} is empty")
    if start != _ZIP_START:
        raise UnusableFileError(f"{path} is damaged or not a {kind}")
    try:
        # torch writes checksums but does not verify them.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is None:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        # The checksums are right, so the file is not damaged.
        raise UnusableFileError(
            f"{path} is refused: it holds {objects_in(error)}, which can run code; "
            f"a {kind} has only tensors and plain values"
        ) from error
    # Damaged archives raise many kinds of errors: zlib, struct, unicode and key errors, sizes
    # beyond memory, unsupported zip features.
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnusableFileError(f"{path} is truncated or damaged ({reason})") from error
    raise UnusableFileError(f"{path} is damaged: the checksum of {damaged} is wrong")


def read_outline(path: Path) -> Any:
    """The values of a file of torch.save without reading its tensors; None if it is unusable.

    For a look at what a file is; `read_saved` checks its contents and raises errors.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # as for `read_saved`; formats of other programs too
        return None


def objects_in(error: Exception) -> str:
    """The object that torch refused to load; torch's own message suggests loading it anyway."""
    found = _GLOBAL.search(str(error))
    return f"an object of {found.group(1)}" if found else "an object that is not a tensor"


def check_contents(
    values: Mapping[str, Any], path: Path, version: int, needed: Iterable[str]
) -> None:
    """Raise an error for contents that this program cannot use.

    Args:
        values: contents of the file at `path`.
        version: the newest version that this program reads.
        needed: required keys besides `version` and `config`.

    Raises:
        UnusableFileError: a key is missing, or the file has a newer version.
    """
    missing = [name for name in ("version", "config", *needed) if name not in values]
    if missing:
        raise UnusableFileError(f"{path} is damaged: it has no {', '.join(map(repr, missing))}")
    if not isinstance(values["version"], int) or not isinstance(values["config"], dict):
        raise UnusableFileError(f"{path} is damaged: 'version' or 'config' has the wrong type")
    if values["version"] > version:
        raise UnusableFileError(
            f"{path} has version {values['version']}, this program reads up to {version}"
        )
