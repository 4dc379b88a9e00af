"""Kernels that gave wrong results on a machine, and that later processes replace by plain torch.

`pruned-rnnt check --write` writes a JSON file of the user. An entry holds for one device and one
set of versions, so that another GPU, driver, torch or build of the package runs its kernels again.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pruned_rnnt.system.json_file import damaged, from_json, read_json
from pruned_rnnt.system.whole_files import write_lines

logger = logging.getLogger("pruned_rnnt")

# The parts that can be switched: the compiled kernels of the losses and searches on a device, the
# Triton kernels of the encoders, and the CUDA graphs of the encoders.
LOSSES, ENCODERS, GRAPHS = PARTS = ("losses", "encoder kernels", "CUDA graphs")

_ADVICE = "delete it, and run `pruned-rnnt check --write` if kernels gave wrong results"
# `pruned-rnnt check` sets it, because it must run the kernels themselves.
_ignored = False


@dataclass(frozen=True, kw_only=True)
class Switch:
    """One entry of the file.

    part: one of PARTS. device: `cpu` or `cuda`. name: of the processor or GPU. versions: of all
    that the kernels depend on. reason: what was wrong.
    """

    part: str
    device: str
    name: str
    versions: Mapping[str, str]
    reason: str = ""

    def is_for(self, other: Switch) -> bool:
        """True if both are about the same kernels."""
        return self.because("") == other.because("")

    def because(self, reason: str) -> Switch:
        """This entry with another reason."""
        return replace(self, reason=reason)


def switch_file() -> Path:
    """The file of this user: pruned_rnnt/switched_kernels.json in XDG_CONFIG_HOME or ~/.config.

    Raises:
        RuntimeError: the user has no home folder.
    """
    folder = os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
    return Path(folder) / "pruned_rnnt" / "switched_kernels.json"


def ignore_switches() -> None:
    """Let this process run all kernels, whatever the file says."""
    global _ignored
    _ignored = True


def current_switches(part: str, device: str, library: Path | None = None) -> list[Switch]:
    """The entries that would switch a part in this process, one for each name of a device.

    library: file with the kernels, if they are compiled into one. On `cuda` this initialises CUDA.
    """
    versions = _versions(device) | ({} if library is None else {"library": _stamp(library)})
    return [
        Switch(part=part, device=device, name=name, versions=versions)
        for name in device_names(device)
    ]


def why_switched(part: str, device: str, library: Path | None = None) -> str:
    """The reason why a part must not run on a device in this process; empty if it may.

    The first question about a switched part puts a warning into the log, with the file's name.
    """
    if _ignored:
        return ""
    try:
        if not switch_file().is_file():
            return ""
    except (OSError, RuntimeError) as error:  # a home folder that is unknown, or not readable
        logger.debug("no kernel is switched to plain torch: %s", error)
        return ""
    return _why_switched(part, device, library)


@functools.cache
def _why_switched(part: str, device: str, library: Path | None) -> str:
    try:
        written = [x for x in read_switches() if (x.part, x.device) == (part, device)]
    except (OSError, ValueError) as error:
        logger.warning("no kernel is switched to plain torch: %s", error)
        return ""
    if not written:
        return ""
    current = current_switches(part, device, library)
    found = [x for x in written if any(x.is_for(each) for each in current)]
    if not found:
        return ""
    reason = f"switched off by `pruned-rnnt check --write`, {switch_file()}: {found[0].reason}"
    logger.warning("%s run in plain torch on %s: %s", part, found[0].name, reason)
    return reason


def read_switches() -> list[Switch]:
    """The entries of the file; none if there is no file.

    Raises:
        ValueError: the file is damaged; the message names it.
    """
    path = switch_file()
    if not path.is_file():
        return []
    try:
        return [from_json(Switch, entry) for entry in read_json(path, _ADVICE)["switched"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(path, error, _ADVICE) from error


def write_switches(checked: Sequence[Switch], wrong: Sequence[Switch]) -> Path:
    """Write the result of a check: entries about `checked` are replaced by those of `wrong`.

    Raises:
        ValueError: the file is damaged.
        OSError: the file cannot be written; the message says what to do.
    """
    others = [x for x in read_switches() if not any(x.is_for(each) for each in checked)]
    path = switch_file()
    entries = [asdict(x) for x in (*others, *wrong)]
    try:
        write_lines(path, [json.dumps({"switched": entries}, indent=2)])
    except OSError as error:
        raise OSError(
            f"{path} cannot be written ({error.strerror}), so nothing is switched: set "
            "XDG_CONFIG_HOME to a folder that can, here and for later processes"
        ) from error
    _why_switched.cache_clear()
    return path


def device_names(device: str) -> list[str]:
    """The names of the GPUs, or of the processor."""
    if device == "cpu":
        return [_processor()]
    import torch

    if not torch.cuda.is_available():
        return []
    names = (torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return list(dict.fromkeys(names))


def driver() -> str:
    """The version of the NVIDIA driver; empty without one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        import torch

        number = getattr(torch._C, "_cuda_getDriverVersion", int)()
        return f"CUDA {number // 1000}.{number % 1000 // 10}" if number else ""
    words = text.splitlines()[0].split()
    return next((word for word in words if word[:1].isdigit()), "unknown")


def installed_version(package: str) -> str:
    """The version of an installed package; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _versions(device: str) -> dict[str, str]:
    import torch

    from pruned_rnnt import __version__

    found = {"pruned_rnnt": __version__, "torch": str(torch.__version__)}
    if device == "cuda":
        found |= {"driver": driver(), "triton": installed_version("triton")}
    return found


def _stamp(library: Path) -> str:
    """Tells one build of a library from another one."""
    stat = library.stat()
    return f"{library}, {stat.st_size} bytes, {stat.st_mtime_ns}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
