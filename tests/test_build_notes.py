"""What the notes beside the compiled libraries, and their absence, let the package say."""

from __future__ import annotations

import shutil
import sys
import warnings
from pathlib import Path

import pytest
import torch

from pruned_rnnt.ops.common import native
from tests.test_build import (
    REPORT,
    cells,
    configure,
    configure_with_cuda,
    needs_cmake,
    needs_cpu_library,
)
from tests.torch_forks import run_with_torch


def warned(folder: Path) -> list[str]:
    native._warn_of_other_sources.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        native._warn_of_other_sources(folder)
    return [str(x.message) for x in caught]


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of a checkout, with notes of a library that was compiled from them."""
    folder = tmp_path / "csrc"
    for name in ("b.cpp", "a/c.cuh", "a.h"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    monkeypatch.setattr(native, "_SOURCES", folder)
    digest = native._digest(folder.rglob("*.*"))
    (tmp_path / "build_notes.txt").write_text(f"cpu: built\nconfigured: 0\nsource: {digest}\n")
    return folder


def test_libraries_of_other_sources_are_warned_of(sources: Path) -> None:
    folder = sources.parent
    assert warned(folder) == []
    (sources / "a/c.cuh").write_text("corrected")
    (message,) = warned(folder)
    assert f"in {folder} were compiled from other sources than those in {sources}" in message
    assert "pip install --no-deps --editable" in message


def test_nothing_is_read_without_a_newer_source(sources: Path) -> None:
    notes = sources.parent / "build_notes.txt"
    (sources / "b.cpp").write_text("corrected")
    notes.write_text(notes.read_text().replace("configured: 0", "configured: 99999999999"))
    assert warned(sources.parent) == []


@pytest.mark.parametrize("text", ["cpu: built\n", "source: 1\n", "configured: x\nsource: 1\n"])
def test_notes_without_sources_are_no_reason_to_warn(sources: Path, text: str) -> None:
    (sources.parent / "build_notes.txt").write_text(text)
    assert warned(sources.parent) == []


@needs_cmake
@pytest.mark.slow
def test_notes_of_a_build_are_those_of_the_sources(tmp_path: Path) -> None:
    configure(tmp_path)
    notes = native._build_notes(tmp_path)
    kinds = (".cpp", ".h", ".cu", ".cuh")
    paths = [path for path in native._SOURCES.rglob("*") if path.suffix in kinds]
    assert notes["source"] == native._digest(paths)
    assert notes["configured"].isdigit()


@needs_cpu_library
@pytest.mark.slow
def test_a_library_of_other_sources_is_used_with_a_warning(tmp_path: Path) -> None:
    library = native.library_file("cpu")
    assert library is not None
    shutil.copy(library, tmp_path)
    (tmp_path / "build_notes.txt").write_text("cpu: built\nconfigured: 0\nsource: 1\n")
    result = run_with_torch(REPORT, PRUNED_RNNT_LIBRARY_DIR=str(tmp_path))
    assert cells(result.stdout, "log_probs")[0] == "native", result.stderr
    assert result.stderr.count("were compiled from other sources") == 1


@pytest.mark.parametrize(
    ("toolkit", "driver", "reason"),
    [
        ("13.0.88", 12080, "compiled with CUDA 13.0.88, and the driver supports only CUDA 12.8"),
        ("13.2.1", 13000, "Could not load this library"),
        ("12.9.1", 13000, "Could not load this library"),
        ("13.0.88", 0, "Could not load this library"),  # no driver
        ("", 12080, "Could not load this library"),
    ],
)
def test_a_driver_that_is_too_old_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, toolkit: str, driver: int, reason: str
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: driver, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("PRUNED_RNNT_LIBRARY_DIR", str(tmp_path))
    (tmp_path / "libpruned_rnnt_cuda.so").write_text("not a library")
    (tmp_path / "build_notes.txt").write_text(f"cuda: built\ntoolkit: {toolkit}\n")
    found = native._load("cuda")
    assert found is not None
    assert "does not load" in found
    assert reason in found


def test_notes_in_another_encoding_are_read(tmp_path: Path) -> None:
    (tmp_path / "build_notes.txt").write_bytes(b"cpu: not built: torch in /home/m\xfcller\n")
    result = run_with_torch(REPORT, PRUNED_RNNT_LIBRARY_DIR=str(tmp_path))
    assert "cpu: fallback (not built: torch in /home/m" in result.stdout, result.stderr


def test_the_build_command_fits_the_installation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkout = tmp_path / "a checkout"
    monkeypatch.setattr(native, "_SOURCES", checkout / "csrc")
    monkeypatch.setattr(native, "_IS_CHECKOUT", False)
    monkeypatch.setattr(torch, "__file__", "/a user/torch/__init__.py")
    assert "PRUNED_RNNT_TORCH_DIR='/a user/torch' " in native._build_command()
    assert f"{sys.executable} -m pip install --no-deps --force-reinstall" in native._build_command()
    monkeypatch.setattr(native, "_driver_version", lambda: 0)
    advice = native._advice("cpu", "")
    assert " run, in pruned_rnnt's source folder: CMAKE_ARGS=-DPRUNED_RNNT_CUDA=OFF " in advice
    monkeypatch.setattr(native, "_IS_CHECKOUT", True)
    monkeypatch.setattr(native, "_driver_version", lambda: 13000)
    assert f" run: {native._build_command()} (PRUNED" in native._advice("cuda", "")
    assert native._build_command().endswith(f" --no-deps --editable '{checkout}'")
    monkeypatch.setattr(sys, "prefix", str(checkout / ".venv"))
    assert native._build_command() == f"bash '{checkout}/scripts/setup.sh'"


@needs_cmake
def test_a_build_folder_takes_the_torch_of_each_call(tmp_path: Path) -> None:
    none = "cpu: not built: no torch 2.11 or later"
    assert none in configure(tmp_path, PRUNED_RNNT_TORCH_DIR=str(tmp_path))
    torch_folder = str(Path(torch.__file__).parent)
    assert none not in configure(tmp_path, PRUNED_RNNT_TORCH_DIR=torch_folder)
    assert none in configure(tmp_path, PRUNED_RNNT_TORCH_DIR=str(tmp_path))


@needs_cmake
@pytest.mark.parametrize("option", ["-DPRUNED_RNNT_CUDA=ON", ""])
def test_a_cuda_library_that_is_required_is_not_left_out(tmp_path: Path, option: str) -> None:
    required = "" if option else "1"
    message = configure_with_cuda(
        tmp_path, *filter(None, [option]), PRUNED_RNNT_REQUIRE_NATIVE=required
    )
    message = " ".join(message.split())
    assert f"CUDA library not built: {tmp_path}/bin/nvcc does not work with this C++" in message
    assert "to have the CPU library alone, set CMAKE_ARGS=-DPRUNED_RNNT_CUDA=OFF" in message


@needs_cmake
def test_a_cuda_library_that_is_not_required_is_left_out(tmp_path: Path) -> None:
    assert configure_with_cuda(tmp_path) == ""
    assert native._build_notes(tmp_path / "build")["cpu"] == "built"
    assert "bin/nvcc does not work" in native._build_notes(tmp_path / "build")["cuda"]
