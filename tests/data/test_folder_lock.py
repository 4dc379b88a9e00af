"""A folder is one program's at a time, and free again when that ends, however it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pruned_rnnt.data.input.prepared_folder import building, write_report
from pruned_rnnt.system.folder_lock import exclusive_folder_lock

# Holds the lock and has a forked child that outlives it, as loader workers do. The child prints a
# line once `fork` has returned: only then has it closed its copy of the handle and left the lock.
HOLDER = """
import os, sys, time
from pathlib import Path
from pruned_rnnt.system.folder_lock import exclusive_folder_lock
with exclusive_folder_lock(Path(sys.argv[1]), "is held"):
    if os.fork() == 0:
        print("held", flush=True)
        time.sleep(20)
        os._exit(0)
    time.sleep(20)
"""


@pytest.mark.slow
def test_lock_is_free_after_its_process_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with (
            pytest.raises(ValueError, match=r"is held by another process: wait"),
            exclusive_folder_lock(tmp_path, "is held"),
        ):
            pass
        holder.kill()
        holder.wait()
        with exclusive_folder_lock(tmp_path, "is held"):
            pass
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
    assert not list(tmp_path.iterdir())


def test_two_builds_of_one_folder(tmp_path: Path) -> None:
    with building(tmp_path / "out") as folder:
        (folder / "half").mkdir()
        with (
            pytest.raises(ValueError, match="unfinished is being written by another"),
            building(tmp_path / "out"),
        ):
            pass
        assert (folder / "half").is_dir()
        write_report(folder, {})
    assert (tmp_path / "out/half").is_dir()
    with building(tmp_path / "out") as folder:
        write_report(folder, {})
    assert not (tmp_path / "out/half").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
