"""Memory in bytes: out-of-memory errors, release of cached memory, and peak usage."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from pruned_rnnt.system.out_of_memory import is_out_of_memory

# Start of the message about a step or batch that did not fit into memory.
OUT_OF_MEMORY = "out of memory"


def out_of_memory_in(work: Callable[[], None], release: Callable[[], None] = lambda: None) -> str:
    """Run `work`; returns the allocator's message if memory ran out, else an empty string.

    The memory that the failed work held is released, after a call of `release`, which drops other
    tensors. Other errors are raised.
    """
    message = ""
    try:
        work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # MemoryError has no text.
        message = (str(error) or type(error).__name__).splitlines()[0]
    # Outside the except block, since the exception's frames hold the tensors of the work.
    if message:
        release()
        release_memory()
    return message


def release_memory() -> None:
    """Release cached memory, and tensors that are held by the frames of a past exception."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reset_peak(device: torch.device) -> None:
    """Reset `peak`, where the system supports it (everywhere except for the CPU on macOS)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif (clear := Path("/proc/self/clear_refs")).exists():
        clear.write_text("5")


def peak(device: torch.device) -> int:
    """Peak memory since `reset_peak`: of tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024
