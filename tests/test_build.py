"""The compiled libraries: their dependence on torch, how they are found, built and reported."""

from __future__ import annotations

import importlib.util
import os
import runpy
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import pruned_rnnt
import pruned_rnnt.public
from pruned_rnnt.ops.common import native
from pruned_rnnt.ops.common.library import FALLBACKS
from pruned_rnnt.ops.common.native import (
    COMPOSED,
    CUDA_ONLY,
    backend_report,
    has_native_kernel,
    library_folders,
)
from tests.torch_forks import run_with_torch

ROOT = Path(__file__).parents[1]

needs_cpu_library = pytest.mark.skipif(
    not has_native_kernel("log_probs", "cpu"), reason="the CPU library is not built"
)
needs_build_backend = pytest.mark.skipif(
    importlib.util.find_spec("scikit_build_core") is None, reason="needs scikit-build-core"
)
needs_cmake = pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")


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
    without = {op for op in FALLBACKS if not has_native_kernel(op, "cpu")}
    assert without == COMPOSED | CUDA_ONLY


@pytest.mark.slow
def test_fallback_is_used_on_request() -> None:
    result = run_with_torch(REPORT, PRUNED_RNNT_BACKEND="fallback")
    assert "cpu: fallback (PRUNED_RNNT_BACKEND=fallback)" in result.stdout, result.stderr
    assert cells(result.stdout, "log_probs") == ["fallback", "fallback"]


def test_unknown_backend_is_refused() -> None:
    result = run_with_torch(REPORT, PRUNED_RNNT_BACKEND="fastest")
    assert "ValueError: PRUNED_RNNT_BACKEND must be one of" in result.stderr


def test_native_on_request_raises_without_a_library(tmp_path: Path) -> None:
    result = run_with_torch(
        REPORT, PRUNED_RNNT_BACKEND="native", PRUNED_RNNT_LIBRARY_DIR=str(tmp_path)
    )
    assert f"ImportError: PRUNED_RNNT_BACKEND=native, but for cpu: no library in {tmp_path}" in (
        result.stderr
    )


def test_missing_library_falls_back_with_the_build_note(tmp_path: Path) -> None:
    (tmp_path / "build_notes.txt").write_text("cpu: not built: no C++ compiler found\n")
    result = run_with_torch(REPORT, PRUNED_RNNT_LIBRARY_DIR=str(tmp_path))
    assert "cpu: fallback (not built: no C++ compiler found)" in result.stdout, result.stderr


def test_broken_library_falls_back_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "libpruned_rnnt_cpu.so").write_text("not a library")
    result = run_with_torch(REPORT, PRUNED_RNNT_LIBRARY_DIR=str(tmp_path))
    assert cells(result.stdout, "log_probs")[0] == "fallback", result.stderr
    assert "does not load" in result.stdout
    assert "UserWarning: pruned_rnnt runs plain torch on cpu" in result.stderr


def test_a_cut_library_falls_back_instead_of_ending_the_process(tmp_path: Path) -> None:
    header = b"\x7fELF\x02\x01".ljust(40, b"\0") + struct.pack("<Q10xHH2x", 10_000, 64, 2)
    (tmp_path / "libpruned_rnnt_cpu.so").write_bytes(header)
    result = run_with_torch(REPORT, PRUNED_RNNT_LIBRARY_DIR=str(tmp_path))
    assert "does not load: its last 10,064 bytes are missing" in result.stdout, result.stderr


CALLS = """
import torch, pruned_rnnt, warnings
from torch._subclasses.fake_tensor import FakeTensorMode
warnings.simplefilter("always")
targets = torch.ones(1, 2, dtype=torch.int64)
def loss(logits):
    return pruned_rnnt.rnnt_loss(logits, targets.to(logits.device))
def gather(device):
    start = torch.zeros(1, 4, dtype=torch.int32, device=device)
    am = torch.zeros(1, 4, 5, device=device)
    pruned_rnnt.prune(am, am[:, :3], pruned_rnnt.Bounds(start, 2))
with FakeTensorMode():
    gather("cpu")
gather("meta")
print("traced", flush=True)
compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
for call in (compiled, loss, compiled):
    with warnings.catch_warnings(record=True) as caught:
        call(torch.zeros(1, 4, 3, 5))
    print(*[w.message for w in caught if "plain torch" in str(w.message)] or ["silent"])
"""


@pytest.mark.slow
def test_missing_library_is_warned_about_once_at_the_first_fallback(tmp_path: Path) -> None:
    """Not at import or while tracing, but in the first call, also of a compiled function."""
    (tmp_path / "build_notes.txt").write_text("cpu: not built: no C++ compiler found\n")
    result = run_with_torch(CALLS, PRUNED_RNNT_LIBRARY_DIR=str(tmp_path))
    assert "plain torch" not in result.stderr
    traced, warning, *silent = result.stdout.splitlines()
    assert traced == "traced"
    assert silent == ["silent", "silent"]
    assert "pruned_rnnt runs plain torch on cpu, several times slower" in warning
    assert "(not built: no C++ compiler found)" in warning
    assert native._build_command() in warning
    assert "PRUNED_RNNT_BACKEND=fallback silences" in warning


@pytest.mark.slow
def test_requested_fallback_is_not_warned_about() -> None:
    result = run_with_torch(CALLS, PRUNED_RNNT_BACKEND="fallback")
    assert result.stdout.splitlines() == ["traced", "silent", "silent", "silent"], result.stderr
    assert "plain torch" not in result.stderr


def configure(build: Path, *options: str, **environment: str) -> str:
    command = ["cmake", "-S", str(ROOT / "csrc"), "-B", str(build), *options]
    subprocess.run(
        [*command, f"-DPython_EXECUTABLE={sys.executable}"],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
    )
    return (build / "build_notes.txt").read_text()


def configure_with_cuda(folder: Path, *options: str, **environment: str) -> str:
    """What CMake complains of with a torch with CUDA and an nvcc that compiles nothing."""
    import torch

    own, fake = Path(torch.__file__).parent, folder / "torch"
    (fake / "lib").mkdir(parents=True)
    (fake / "include").symlink_to(own / "include")
    (fake / "lib/libtorch_cpu.so").symlink_to(own / "lib/libtorch_cpu.so")
    (fake / "lib/libtorch_cuda.so").touch()
    nvcc = folder / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho unsupported GNU version >&2; exit 1\n")
    nvcc.chmod(0o755)
    environment |= {
        "PATH": f"{nvcc.parent}{os.pathsep}{os.environ['PATH']}",
        "PRUNED_RNNT_TORCH_DIR": str(fake),
        "CUDACXX": "",
    }
    try:
        configure(folder / "build", *options, **environment)
    except subprocess.CalledProcessError as error:
        return str(error.stderr.decode())
    return ""


@needs_cmake
def test_configuring_without_a_compiler_succeeds_with_a_note(tmp_path: Path) -> None:
    notes = configure(tmp_path, CXX=str(tmp_path / "no_such_compiler"))
    assert "cpu: not built: no C++ compiler found" in notes
    assert "cuda: not built: no C++ compiler found" in notes


@needs_cmake
def test_configuring_without_torch_succeeds_with_a_note(tmp_path: Path) -> None:
    notes = configure(tmp_path, f"-DPRUNED_RNNT_TORCH_DIR={tmp_path}")
    assert "cpu: not built: no torch 2.11 or later" in notes
    assert "set PRUNED_RNNT_TORCH_DIR to the folder of the installed torch package" in notes


CHOOSE_ARCHITECTURES = """
cmake_minimum_required(VERSION 3.24)
include({root}/csrc/cmake/cuda_architectures.cmake)
native_cuda_architectures({folder}/nvcc native)
all_cuda_architectures({folder}/nvcc all)
message("native: ${{native}} all: ${{all}}")
"""


@needs_cmake
@pytest.mark.parametrize(
    ("capabilities", "native"),
    [
        (["9.0", "9.0"], "90-real"),
        (["8.6", "12.0"], "86-real;120-real"),
        (["8.6", "13.5"], ""),  # the second one is too new for this nvcc
        ([], ""),
    ],
)
def test_cuda_architectures(tmp_path: Path, capabilities: list[str], native: str) -> None:
    known = " ".join(f"compute_{arch}" for arch in (70, 75, 80, 86, 87, 90, 100, 120))
    outputs = {"nvcc": known.split(), "nvidia-smi": capabilities}
    for name, lines in outputs.items():
        program = tmp_path / name
        program.write_text("#!/bin/sh\n" + "".join(f"echo {line}\n" for line in lines))
        program.chmod(0o755)
    script = tmp_path / "choose.cmake"
    script.write_text(CHOOSE_ARCHITECTURES.format(root=ROOT, folder=tmp_path))
    done = subprocess.run(
        ["cmake", "-P", str(script)],
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    every = "75-real;80-real;87-real;90-real;100-real;120-real;120-virtual"
    assert done.stderr.strip() == f"native: {native} all: {every}"


def build_wheel(output: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build a wheel without a torch."""
    code = (
        "import os; from scikit_build_core.build import build_wheel;"
        f"build_wheel({str(output)!r}, {{'build-dir': {str(output / 'build')!r}}})"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PRUNED_RNNT_TORCH_DIR": str(output), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@needs_cmake
@needs_build_backend
def test_wheel_without_libraries_is_for_any_platform(tmp_path: Path) -> None:
    result = build_wheel(tmp_path)
    wheels = [path.name for path in tmp_path.glob("*.whl")]
    assert [name.split("-", 2)[2] for name in wheels] == ["py3-none-any.whl"], result.stderr
    assert "this wheel has no native libraries" in result.stdout + result.stderr
    assert wheels[0].split("-")[1] == pruned_rnnt.__version__
    with zipfile.ZipFile(tmp_path / wheels[0]) as wheel:
        assert "pruned_rnnt/py.typed" in wheel.namelist()


@pytest.mark.slow
@needs_cmake
@needs_build_backend
def test_wheel_without_libraries_is_refused_on_request(tmp_path: Path) -> None:
    result = build_wheel(tmp_path, PRUNED_RNNT_REQUIRE_NATIVE="1")
    assert result.returncode != 0
    assert "native libraries not built: no torch 2.11 or later" in " ".join(result.stderr.split())
    assert list(tmp_path.glob("*.whl")) == []


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PATH", f"/no/such/bin{os.pathsep}{{}}/.venv/bin"),
        ("VIRTUAL_ENV", "{}/.venv"),
        ("CONDA_PREFIX", "{}/.venv"),
        ("PWD", "{}"),
    ],
)
def test_torch_of_the_activated_environment_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """uv and build run the build in an environment other than the activated one."""
    torch_folder = tmp_path / ".venv/lib/python3.11/site-packages/torch"
    torch_folder.mkdir(parents=True)
    monkeypatch.setenv(variable, value.format(tmp_path))
    find_torch = runpy.run_path(str(ROOT / "csrc/cmake/find_torch.py"), run_name="find_torch")
    assert torch_folder in find_torch["candidates"]()
