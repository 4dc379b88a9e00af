"""Times and peak memory of a repeated step, on the CPU and on a CUDA device."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import NamedTuple

import torch

from scripts.benchmark.systems import Step

MIB = 1 << 20


class Measurement(NamedTuple):
    """Seconds of the repeats (median, 20th and 80th percentile); peak memory above the inputs, in
    MiB: allocated device memory, or on the CPU the peak of the process's resident memory."""

    median: float
    p20: float
    p80: float
    peak_mib: float


def measure(step: Step, device: str, repeats: int, warm_up: int = 3) -> Measurement:
    """Runs a step warm_up + repeats times."""
    for _ in range(warm_up):
        step()
    on_gpu = torch.device(device).type == "cuda"
    seconds = (_gpu_seconds if on_gpu else _cpu_seconds)(step, repeats)
    quantiles = torch.tensor(seconds, dtype=torch.float64).quantile(
        torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)
    )
    median, p20, p80 = quantiles.tolist()
    peak = _gpu_peak(step) if on_gpu else _cpu_peak(step)
    return Measurement(median, p20, p80, peak / MIB)


def _cpu_seconds(step: Step, repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return seconds


def _gpu_seconds(step: Step, repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return seconds


def _gpu_peak(step: Step) -> float:
    step.clear()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)


def _cpu_peak(step: Step) -> float:
    step.clear()
    # What the C library keeps of freed memory would hide as much of the step's own.
    ctypes.CDLL(None).malloc_trim(0)
    before = _resident("VmRSS")
    # Sets the kernel's high-water mark of this process back to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    step()
    return float(_resident("VmHWM") - before)


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
