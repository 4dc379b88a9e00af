"""The scripts of a first hour, with stand-ins for what they call."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def program(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return path


def run(
    script: Path, folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(script)],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    folder = tmp_path / "a checkout/scripts"
    folder.mkdir(parents=True)
    for name in ("setup.sh", "quickstart.sh"):
        shutil.copy(ROOT / "scripts" / name, folder)
    return folder


def test_setup_refuses_an_old_python(scripts: Path) -> None:
    old = program(scripts.parent / "python3.10", "exit 1")
    result = run(scripts / "setup.sh", PYTHON=str(old))
    assert result.returncode == 1
    assert result.stderr == f"{old} is not Python 3.11 or later: set PYTHON to one that is\n"
    assert not (scripts.parent / ".venv").exists()


def test_setup_moves_a_venv_of_an_old_python_away(scripts: Path) -> None:
    program(scripts.parent / ".venv/bin/python", "exit 1")
    python = program(scripts.parent / "python", '[ "$1" = -c ] || { echo "called $*"; exit 3; }')
    result = run(scripts / "setup.sh", PYTHON=str(python))
    assert (result.returncode, result.stdout) == (3, "called -m venv .venv\n")
    assert not (scripts.parent / ".venv").exists()
    assert len(list(scripts.parent.glob(".venv.old.*/.venv/bin/python"))) == 1


def test_setup_installs_a_pip_that_a_venv_lacks(scripts: Path) -> None:
    lacks = ('[ "$2" = ensurepip ] && { echo "called $*"; exit 3; }', '[ "$1" = -c ]')
    program(scripts.parent / ".venv/bin/python", *lacks)
    result = run(scripts / "setup.sh", PYTHON="/no/such/python")
    assert (result.returncode, result.stdout) == (3, "called -m ensurepip\n")


def test_setup_keeps_a_good_venv(scripts: Path) -> None:
    log = 'case "$*" in *install*) echo "called $*"; exit 3;; esac'
    program(scripts.parent / ".venv/bin/python", log)
    result = run(scripts / "setup.sh", PYTHON="/no/such/python")
    assert result.stdout.startswith("called -m pip install --quiet torch")


@pytest.mark.parametrize("output", ["", "results", "{}/results"])
def test_output_of_the_quickstart_is_relative_to_its_caller(scripts: Path, output: str) -> None:
    program(scripts / "setup.sh")
    program(scripts.parent / ".venv/bin/pruned-rnnt", 'echo "$*"')
    caller = scripts.parents[1] / "caller"
    caller.mkdir()
    result = run(scripts / "quickstart.sh", caller, OUTPUT=output.format(caller))
    expected = f"{caller}/results" if output else "."
    assert f"prepare synthetic --output {expected}/data/synthetic\n" in result.stdout
    assert f"open {expected}/exp/synthetic/report.html" in result.stdout


def test_the_symbol_check_names_what_it_needs(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts/check_symbols.py"), "library.so"],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr == "nm is not on the path: install binutils\n"
