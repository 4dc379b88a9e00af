"""The compiled libraries as files: what they need of torch, how they are found and reported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pruned_rnnt.ops._library import FALLBACKS
from pruned_rnnt.ops._native import (
    COMPOSED,
    backend_report,
    has_native_kernel,
    library_folders,
)

ROOT = Path(__file__).parents[1]

needs_cpu_library = pytest.mark.skipif(
    not has_native_kernel("log_probs", "cpu"), reason="the CPU library is not built"
)
needs_cmake = pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    cleared = {k: v for k, v in os.environ.items() if not k.startswith("PRUNED_RNNT_")}
    path = os.pathsep.join([str(ROOT), cleared.pop("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**cleared, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


REPORT = "import pruned_rnnt.ops; print(pruned_rnnt.ops.backend_report())"


def cells(report: str, op: str) -> list[str]:
    line = next(line for line in report.splitlines() if line.split()[0] == op)
    return line.split()[1:]


@needs_cpu_library
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_library_needs_only_the_stable_interface() -> None:
    script = ROOT / "scripts/check_symbols.py"
    libraries = [str(path) for folder in library_folders() for path in folder.glob("*_cpu.so")]
    result = subprocess.run(
        [sys.executable, str(script), *libraries], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 unstable" in result.stdout


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_symbol_check_finds_an_unstable_symbol() -> None:
    import torch

    library = Path(torch.__file__).parent / "lib/libtorch_python.so"
    if not library.is_file():
        pytest.skip("this torch has no libtorch_python.so")
    script = ROOT / "scripts/check_symbols.py"
    result = subprocess.run(
        [sys.executable, str(script), str(library)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "c10::" in result.stdout


def test_report_names_every_op() -> None:
    report = backend_report()
    for op in FALLBACKS:
        without = "composed" if op in COMPOSED else "fallback"
        assert cells(report, op)[0] == ("native" if has_native_kernel(op, "cpu") else without)


@needs_cpu_library
def test_every_op_has_a_cpu_kernel() -> None:
    assert {op for op in FALLBACKS if not has_native_kernel(op, "cpu")} == COMPOSED


def test_fallback_is_used_on_request() -> None:
    result = run_python(REPORT, PRUNED_RNNT_BACKEND="fallback")
    assert "cpu: fallback (PRUNED_RNNT_BACKEND=fallback)" in result.stdout, result.stderr
    assert cells(result.stdout, "log_probs") == ["fallback", "fallback"]


def test_unknown_backend_is_refused() -> None:
    result = run_python(REPORT, PRUNED_RNNT_BACKEND="fastest")
    assert "ValueError: PRUNED_RNNT_BACKEND must be one of" in result.stderr


def test_native_on_request_raises_without_a_library(tmp_path: Path) -> None:
    result = run_python(REPORT, PRUNED_RNNT_BACKEND="native", PRUNED_RNNT_LIBRARY_DIR=str(tmp_path))
    assert f"ImportError: PRUNED_RNNT_BACKEND=native, but for cpu: no library in {tmp_path}" in (
        result.stderr
    )


def test_missing_library_falls_back_with_the_build_note(tmp_path: Path) -> None:
    (tmp_path / "build_notes.txt").write_text("cpu: not built: no C++ compiler found\n")
    result = run_python(REPORT, PRUNED_RNNT_LIBRARY_DIR=str(tmp_path))
    assert "cpu: fallback (not built: no C++ compiler found)" in result.stdout, result.stderr


def test_broken_library_falls_back_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "libpruned_rnnt_cpu.so").write_text("not a library")
    result = run_python(REPORT, PRUNED_RNNT_LIBRARY_DIR=str(tmp_path))
    assert cells(result.stdout, "log_probs")[0] == "fallback", result.stderr
    assert "does not load" in result.stdout
    assert "UserWarning: pruned_rnnt runs plain torch on cpu" in result.stderr


def configure(build: Path, *options: str, **environment: str) -> str:
    command = ["cmake", "-S", str(ROOT / "csrc"), "-B", str(build), *options]
    subprocess.run(
        [*command, f"-DPython_EXECUTABLE={sys.executable}"],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
    )
    return (build / "build_notes.txt").read_text()


@needs_cmake
def test_configuring_without_a_compiler_succeeds_and_says_so(tmp_path: Path) -> None:
    notes = configure(tmp_path, CXX=str(tmp_path / "no_such_compiler"))
    assert "cpu: not built: no C++ compiler found" in notes
    assert "cuda: not built: no C++ compiler found" in notes


@needs_cmake
def test_configuring_without_torch_succeeds_and_says_so(tmp_path: Path) -> None:
    notes = configure(tmp_path, f"-DPRUNED_RNNT_TORCH_DIR={tmp_path}")
    assert "cpu: not built: no torch 2.11 or later" in notes
