"""Files and sets of files that appear whole or not at all."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pruned_rnnt.system.folder_lock import exclusive_folder_lock
from pruned_rnnt.system.folders import empty_folder


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a text file, of which a reader sees the old content or the new one; `lines` without
    line ends.

    Raises:
        OSError: with the name `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, of which a reader sees the old content or the new one, and the folders that it
    needs.

    Raises:
        OSError: with the name `path`.
    """
    with _replacing(path) as temporary:
        try:
            temporary.write_bytes(content)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(content)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield another name beside a file. What is written there replaces the file; an error removes
    it and leaves the file as it is; one of the disk, such as a full one, gets the file's name."""
    # Not the process's number: those of several machines that share the folder may be equal. Not
    # the file's name: it may be as long as names can be.
    temporary = path.with_name(f".{secrets.token_hex(8)}")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if not isinstance(error, OSError) or error.errno is None:
            raise
        if error.filename is not None and str(error.filename) != str(temporary):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def appearing_together(folder: Path, replacing: Sequence[str] = ()) -> Iterator[Path]:
    """Yield an empty folder, whose files move to `folder` if there was no error.

    Args:
        replacing: patterns of earlier files in `folder` that are removed then; others stay.

    Raises:
        ValueError: another process is writing the same folder.
        OSError: with the name of a file, or of the folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Inside, if possible: only the folder itself may be writable, or be of another file system.
    place = folder if folder.is_dir() else folder.parent
    unfinished = place / f".{folder.name}.unfinished"
    unfinished.mkdir(exist_ok=True)
    with exclusive_folder_lock(unfinished, "is being written"):
        try:
            empty_folder(unfinished)  # of what a killed process has left
            try:
                yield unfinished
            except OSError as error:
                if error.filename is None and error.errno is not None:
                    raise OSError(error.errno, error.strerror, str(folder)) from error
                raise
            folder.mkdir(exist_ok=True)
            for pattern in replacing:
                for old in folder.glob(pattern):
                    old.unlink()
            for path in unfinished.iterdir():
                path.replace(folder / path.name)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
