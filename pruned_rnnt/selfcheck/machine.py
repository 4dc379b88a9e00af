"""The versions and devices that results depend on."""

from __future__ import annotations

import os
import platform

import torch

from pruned_rnnt import __version__
from pruned_rnnt.ops.common.native import backend_report
from pruned_rnnt.system.switched_kernels import device_names, driver, installed_version


def describe_machine(device: torch.device) -> dict[str, str]:
    """Names with values, in the order in which they are printed."""
    triton = installed_version("triton") or installed_version("pytorch-triton")
    found = {
        "pruned_rnnt": __version__,
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA of torch": str(torch.version.cuda or "none"),
        "NVIDIA driver": driver() or "none",
        "Triton": triton or "not installed",
        "system": platform.platform(),
        "processor": cpu_name(),
    }
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        found["GPU"] = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    # The lines of the ops follow those of the libraries and end with the first header of a table.
    libraries = backend_report().partition("\nop ")[0].splitlines()
    found["backend"] = libraries[0].partition(", ")[2]
    return found | {f"kernels on {x}": y for x, _, y in (x.partition(": ") for x in libraries[1:])}


def cpu_name() -> str:
    """As the committed rows of the benchmark name it."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        cores = os.cpu_count() or 1
    level, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    used = "" if threads == cores else f", {threads} threads used"
    return f"{cores}-core {device_names('cpu')[0]} ({level}){used}"
