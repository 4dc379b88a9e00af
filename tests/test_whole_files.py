"""Files that appear whole or not at all: errors of the disk name the file, not a temporary one."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from pruned_rnnt.system.whole_files import appearing_together, write_lines, write_whole


def lines_of_a_full_disk() -> Iterator[str]:
    yield "one"
    raise OSError(errno.ENOSPC, "No space left on device")


def lines_of_a_missing_file() -> Iterator[str]:
    yield Path("absent").read_text()


def test_a_full_disk_is_named_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "scores.txt"
    path.write_text("old")
    with pytest.raises(OSError, match=f"No space left on device: '{path}'") as caught:
        write_lines(path, lines_of_a_full_disk())
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(FileNotFoundError, match="'absent'"):
        write_lines(path, lines_of_a_missing_file())
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_created_is_named(tmp_path: Path) -> None:
    long = tmp_path / ("a" * 300)
    with pytest.raises(OSError, match=f"'{long}'"):
        write_whole(long, b"")
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'new'}'"):  # noqa: SIM117
        with appearing_together(tmp_path / "new"):
            raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []
