"""Finds and loads the compiled libraries, and reports which op runs where.

A library is one file for each device, `libpruned_rnnt_cpu.so` and `libpruned_rnnt_cuda.so`, in a
folder `lib` of the installed package; an editable install may have several package folders, and
all are searched. `build_notes.txt` in the same folder says which libraries were built, from which
sources, and why others were not.
Environment:
    PRUNED_RNNT_BACKEND      auto (default): compiled kernels if there are any, else plain torch;
                             native: raise if a library for this machine is missing;
                             fallback: plain torch only
    PRUNED_RNNT_LIBRARY_DIR  the one folder to search instead
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import struct
import sys
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

from pruned_rnnt.ops.common.library import FALLBACKS, MISSING_KERNELS, NAMESPACE
from pruned_rnnt.system.switched_kernels import LOSSES, why_switched

BACKENDS = ("auto", "native", "fallback")
DEVICES = ("cpu", "cuda")
# Ops that only call other ops and torch's kernels; on CUDA, `scale` is a kernel of its own and the
# library calls the kernels of `fused_log_probs`, which saves the host time.
COMPOSED = frozenset(
    ["ctc", "fused_log_probs", "fused_log_probs_backward", "scale", "simple_product", "simple_sums"]
)
# Ops that are called where they have CUDA kernels only: their fallbacks state what those compute.
CUDA_ONLY = frozenset(
    [
        "active_gradients",
        "active_joiner_rows",
        "active_joiner_rows_backward",
        "active_log_probs_backward",
        "counted_rows_product",
        "counted_rows_sums",
        "fitting_splits",
        "list_active_rows",
        "output_layer",
        "packed_log_probs",
    ]
)

_SOURCES = Path(__file__).parents[3] / "csrc"
# Beside an installed package may be a folder of that name that another one left.
_IS_CHECKOUT = (_SOURCES / "cmake" / "find_torch.py").is_file()

# Of a 64-bit file: the place of its section headers, which are at the end, their size and number.
_ELF_HEADER = struct.Struct("<40xQ10xHH2x")

logger = logging.getLogger("pruned_rnnt")

# The source of the kernels of each device, in words; load_native fills this in.
_STATE: dict[str, str] = {}


def requested_backend() -> str:
    """The value of PRUNED_RNNT_BACKEND, or ValueError for an unknown one."""
    backend = os.environ.get("PRUNED_RNNT_BACKEND", "") or "auto"
    if backend not in BACKENDS:
        raise ValueError(f"PRUNED_RNNT_BACKEND must be one of {BACKENDS}, got {backend!r}")
    return backend


def library_folders() -> list[Path]:
    """Folders to search for the libraries, in this order."""
    chosen = os.environ.get("PRUNED_RNNT_LIBRARY_DIR")
    if chosen:
        return [Path(chosen)]
    package = [Path(entry) for entry in sys.modules[__package__.partition(".")[0]].__path__]
    return list(dict.fromkeys([*(p / "lib" for p in package), Path(__file__).parents[2] / "lib"]))


def library_file(device: str) -> Path | None:
    """The library of a device; None if there is none."""
    files = (folder / f"libpruned_rnnt_{device}.so" for folder in library_folders())
    return next((path for path in files if path.is_file()), None)


def _build_notes(folder: Path) -> dict[str, str]:
    """The notes beside the libraries by name, which csrc/CMakeLists.txt writes; empty without."""
    file = folder / "build_notes.txt"
    if not file.is_file():
        return {}
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return {name: note for name, _, note in (line.partition(": ") for line in lines)}


def _build_note(device: str) -> str:
    for folder in library_folders():
        note = _build_notes(folder).get(device, "built")
        if note != "built":
            return note
    reason = f"no library in {', '.join(map(str, library_folders()))}"
    if os.environ.get("PRUNED_RNNT_LIBRARY_DIR"):
        return reason
    return f"{reason} (perhaps it was installed without a compiler, or before torch)"


def driver_obstacle(toolkit: str) -> str:
    """Why this machine's driver runs nothing that a version of the CUDA toolkit compiled; empty if
    it does. This starts no CUDA context."""
    major, driver = toolkit.partition(".")[0], _driver_version()
    if not major.isdigit() or not 0 < driver // 1000 < int(major):
        return ""
    return (
        f"it was compiled with CUDA {toolkit}, and the driver supports only CUDA "
        f"{driver // 1000}.{driver % 1000 // 10}: update the driver, or compile it with CUDA "
        f"{driver // 1000}"
    )


def _driver_version() -> int:
    """The CUDA version that the driver supports, 1000 * major + 10 * minor; 0 without one."""
    try:
        return int(getattr(torch._C, "_cuda_getDriverVersion", int)())
    except RuntimeError:  # a driver that does not work
        return 0


@cache
def _warn_of_other_sources(folder: Path) -> None:
    """A warning if the libraries of a folder were not compiled from the sources of this checkout.

    Reading all sources takes several milliseconds, so it happens only if one is newer than the
    build.
    """
    notes = _build_notes(folder)
    if not _IS_CHECKOUT or "source" not in notes:
        return
    try:
        paths = [x for x in _SOURCES.rglob("*") if x.suffix in (".cpp", ".h", ".cu", ".cuh")]
        if all(path.stat().st_mtime < int(notes["configured"]) for path in paths):
            return
        source = _digest(paths)
    except (OSError, KeyError, ValueError) as error:
        logger.debug("%s and %s are not compared: %r", folder, _SOURCES, error)
        return
    if source != notes["source"]:
        warnings.warn(
            f"the kernels of pruned_rnnt in {folder} were compiled from other sources than those "
            f"in {_SOURCES}, and may fail or be wrong; compile them again: {_build_command()}",
            stacklevel=2,
        )


def _digest(paths: Iterable[Path]) -> str:
    """The digest of sources that csrc/CMakeLists.txt notes."""
    names = sorted(str(path.relative_to(_SOURCES)) for path in paths)
    lines = [f"{x} {hashlib.sha256((_SOURCES / x).read_bytes()).hexdigest()}\n" for x in names]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _load(device: str) -> str | None:
    """Loads the library of a device. Returns None, or the reason why it cannot be loaded."""
    if device == "cuda" and torch.version.cuda is None:
        return "the installed torch has no CUDA"
    path = library_file(device)
    if path is None:
        return _build_note(device)
    if reason := why_switched(LOSSES, device, path):
        return reason
    try:
        if missing := _missing_bytes(path):
            return f"{path} does not load: its last {missing:,} bytes are missing; install it again"
        if device == "cuda":
            toolkit = _build_notes(path.parent).get("toolkit", "")
            if obstacle := driver_obstacle(toolkit):
                return f"{path} does not load: {obstacle}"
        _warn_of_other_sources(path.parent)
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path} does not load: {error}"
    _STATE[device] = f"native ({path})"
    return None


def _missing_bytes(path: Path) -> int:
    """The number of bytes that were cut off the end of an ELF file.

    The loader maps such a file and ends the process with SIGBUS.
    """
    with path.open("rb") as file:
        header = file.read(_ELF_HEADER.size)
    if len(header) < _ELF_HEADER.size or not header.startswith(b"\x7fELF\x02\x01"):
        return 0
    numbers: tuple[int, int, int] = _ELF_HEADER.unpack(header)
    sections, size, count = numbers
    return max(0, sections + size * count - path.stat().st_size)


def load_native() -> None:
    """Loads the libraries that PRUNED_RNNT_BACKEND selects, once at import.

    Raises:
        ImportError: PRUNED_RNNT_BACKEND=native, and the CPU library, or the CUDA library on a
            machine with a CUDA device, cannot be loaded.
    """
    backend = requested_backend()
    for device in DEVICES:
        if backend == "fallback":
            _STATE[device] = "fallback (PRUNED_RNNT_BACKEND=fallback)"
            continue
        reason = _load(device)
        if reason is None:
            continue
        if backend == "native" and (device == "cpu" or torch.cuda.is_available()):
            raise ImportError(f"PRUNED_RNNT_BACKEND=native, but for {device}: {reason}")
        _STATE[device] = f"fallback ({reason})"
        if "does not load" in reason:
            warnings.warn(f"pruned_rnnt runs plain torch on {device}: {reason}", stacklevel=2)
        elif library_file(device) is None and (device == "cpu" or torch.version.cuda is not None):
            MISSING_KERNELS[device] = _advice(device, reason)
    for device, state in _STATE.items():
        logger.debug("%s: %s", device, state)


def _advice(device: str, reason: str) -> str:
    """The warning for a missing library, with the command that builds it."""
    tools = "a C++ compiler" if device == "cpu" else "nvcc"
    where = "" if _IS_CHECKOUT else ", in pruned_rnnt's source folder"
    options = "" if _driver_version() else "CMAKE_ARGS=-DPRUNED_RNNT_CUDA=OFF "
    return (
        f"pruned_rnnt runs plain torch on {device}, several times slower than its compiled kernels "
        f"({reason}). To build them, have {tools} on the path and run{where}: "
        f"{_build_command(options)} (PRUNED_RNNT_BACKEND=fallback silences this warning)"
    )


def _build_command(options: str = "") -> str:
    """The shell command that compiles the libraries for this interpreter.

    A checkout stays an editable installation, and another package is replaced. options: variables
    for an installation that requires the libraries, which scripts/setup.sh does not.
    """
    checkout = _SOURCES.parent
    if Path(sys.prefix) == checkout / ".venv":
        return f"bash {shlex.quote(str(checkout / 'scripts/setup.sh'))}"
    replaced = "--force-reinstall ."
    if _IS_CHECKOUT:
        replaced = f"--editable {shlex.quote(str(checkout))}"
    torch_folder, python = (
        shlex.quote(str(x)) for x in (Path(torch.__file__).parent, sys.executable)
    )
    return (
        f"{options}PRUNED_RNNT_REQUIRE_NATIVE=1 PRUNED_RNNT_TORCH_DIR={torch_folder} "
        f"{python} -m pip install --no-deps {replaced}"
    )


def backend_summary(device: str) -> str:
    """The source of the kernels for a device type: "native (FILE)" or "fallback (REASON)".

    device: "cpu", "cuda" or another device type of torch, which has no compiled kernels.
    """
    return _STATE.get(device, "fallback (no compiled kernels for this kind of device)")


@cache
def has_native_kernel(op: str, device: str) -> bool:
    """True if the op of that name has a compiled kernel for "cpu" or "cuda" in this process."""
    name = f"{NAMESPACE}::{op}"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, device.upper()))


def backend_report() -> str:
    """The backend of each device and each op in this process, with the reasons, as text.

    "native" is a compiled kernel, "fallback" plain torch (which every other device uses), and
    "composed" an op that calls other ops and torch's own kernels.
    """
    lines = [f"torch {torch.__version__}, PRUNED_RNNT_BACKEND={requested_backend()}"]
    lines += [f"{device}: {backend_summary(device)}" for device in DEVICES]
    width = max(map(len, FALLBACKS), default=0) + 2
    lines.append("op".ljust(width) + "".join(device.ljust(10) for device in DEVICES).rstrip())
    for op in FALLBACKS:
        without = "composed" if op in COMPOSED else "fallback"
        cells = ["native" if has_native_kernel(op, device) else without for device in DEVICES]
        lines.append(op.ljust(width) + "".join(cell.ljust(10) for cell in cells).rstrip())
    return "\n".join(lines)
