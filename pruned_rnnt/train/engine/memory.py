"""Memory: errors that mean it ran out, giving back what is cached, and the peak of a piece of work.

Units are bytes.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from pruned_rnnt.out_of_memory import is_out_of_memory

# How the problem of a step or batch without memory begins.
OUT_OF_MEMORY = "out of memory"


def out_of_memory_in(work: Callable[[], None]) -> str:
    """Do some work; what the allocator said when memory ran out in it, else empty.

    Memory that only the work held is given back then. Other errors are raised.
    """
    message = ""
    try:
        work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # Python's own error has no text.
        message = (str(error) or type(error).__name__).splitlines()[0]
    # Only here, without the exception, are the frames gone that hold the tensors of the work.
    if message:
        release_memory()
    return message


def release_memory() -> None:
    """Give cached memory back; tensors that only a dead exception's frames held go as well."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reset_peak(device: torch.device) -> None:
    """Start measuring `peak` anew, where the system can (everywhere but on macOS' CPU)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif (clear := Path("/proc/self/clear_refs")).exists():
        clear.write_text("5")


def peak(device: torch.device) -> int:
    """Largest memory since `reset_peak`: of tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024
