"""Compile other packages from their source archives (pip download --no-binary :all: --no-deps) for
the installed torch and the CUDA device, without their build scripts, which require older ones."""

from __future__ import annotations

import importlib
import sys
import tarfile
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

HEADERS = Path(__file__).parent / "peer_headers"


@dataclass(frozen=True)
class Source:
    """A package: its name, the name of its compiled module, the source files below its root, the
    folder below its root to add to the Python path, and the flags of its own build script."""

    package: str
    extension: str
    files: tuple[str, ...]
    python: str
    flags: tuple[str, ...] = ()
    nvcc_flags: tuple[str, ...] = ()
    prepare: Callable[[Path], None] = lambda root: None


def _write_torch_version(root: Path) -> None:
    """optimized_transducer refuses any torch whose version is not in this file."""
    module = root / "optimized_transducer/python/optimized_transducer/torch_version.py"
    module.write_text(f"optimized_transducer_torch_version = {str(torch.__version__)!r}\n")


def _stand_in_for_pkg_resources(root: Path) -> None:
    """warp_rnnt reads its version through pkg_resources, which setuptools no longer has."""
    stand_in = types.ModuleType("pkg_resources")
    version = root.name.rpartition("-")[2]
    stand_in.get_distribution = lambda name: types.SimpleNamespace(version=version)
    sys.modules["pkg_resources"] = stand_in


SOURCES = [
    Source(
        "fast_rnnt",
        "_fast_rnnt",
        (
            "fast_rnnt/csrc/mutual_information_cpu.cu",
            "fast_rnnt/csrc/mutual_information_cuda.cu",
            "fast_rnnt/python/csrc/fast_rnnt.cu",
            "fast_rnnt/python/csrc/mutual_information.cu",
        ),
        "fast_rnnt/python",
        flags=("-DFT_WITH_CUDA",),
    ),
    Source(
        "optimized_transducer",
        "_optimized_transducer",
        (
            "optimized_transducer/csrc/transducer-loss.cc",
            "optimized_transducer/csrc/cpu.cc",
            "optimized_transducer/csrc/cuda.cu",
            "optimized_transducer/csrc/kernels.cu",
            "optimized_transducer/python/csrc/optimized_transducer.cc",
        ),
        "optimized_transducer/python",
        flags=("-DOT_WITH_CUDA",),
        nvcc_flags=("--expt-extended-lambda", "-use_fast_math"),
        prepare=_write_torch_version,
    ),
    Source(
        "warp_rnnt",
        "warp_rnnt._C",
        ("core.cu", "core_gather.cu", "core_compact.cu", "binding.cpp"),
        ".",
        prepare=_stand_in_for_pkg_resources,
    ),
]


def _unpacked(archives: Path, source: Source, build: Path) -> Path:
    found = sorted(archives.glob(f"{source.package}-*.tar.gz"))
    if not found:
        raise FileNotFoundError(f"no {source.package}-*.tar.gz in {archives}")
    with tarfile.open(found[-1]) as archive:
        archive.extractall(build, filter="data")
    return build / found[-1].name.removesuffix(".tar.gz")


def _compile(archives: Path, source: Source, build: Path) -> None:
    from torch.utils.cpp_extension import load

    root = _unpacked(archives, source, build)
    source.prepare(root)
    objects = build / f"{source.package}_objects"
    objects.mkdir(exist_ok=True)
    module = load(
        name=source.extension.rpartition(".")[2],
        sources=[str(root / file) for file in source.files],
        extra_include_paths=[str(root), str(HEADERS)],
        extra_cflags=["-O3", *source.flags],
        extra_cuda_cflags=["-O3", *source.flags, *source.nvcc_flags],
        build_directory=str(objects),
        with_cuda=True,
    )
    sys.modules[source.extension] = module
    # The root has the metadata with the version.
    sys.path[:0] = [str(root / source.python), str(root)]
    importlib.import_module(source.package)


def compile_all(archives: Path, build: Path) -> dict[str, str]:
    """Compile every package whose archive is in the folder, in parallel, and make it importable.

    Returns:
        The reason for each package that fails.
    """
    build.mkdir(parents=True, exist_ok=True)
    reasons: dict[str, str] = {}
    with ThreadPoolExecutor(len(SOURCES)) as pool:
        tasks = {
            source.package: pool.submit(_compile, archives, source, build) for source in SOURCES
        }
    for package, task in tasks.items():
        error = task.exception()
        if error is not None:
            lines = [line for line in str(error).splitlines() if "error" in line.lower()]
            reasons[package] = "\n".join([type(error).__name__, *(lines or [str(error)])[:8]])
    return reasons
