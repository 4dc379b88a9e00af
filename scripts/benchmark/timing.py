"""Times, peak memory, launches and waits of a repeated step, on the CPU and on a CUDA device."""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from scripts.benchmark.systems import ReplayedStep, Step

MIB = 1 << 20
# Warm-up calls, and their least duration on a GPU: the times of short steps are those of the host,
# which needs some dozens of calls to reach its full speed.
WARM_UPS = 3
WARM_UP_SECONDS = 0.1
# Calls of the CUDA runtime that make the host wait for the device.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


class Measurement(NamedTuple):
    """Seconds per call (median, 20th and 80th percentile), and peak memory above the inputs in MiB:
    allocated device memory, or on the CPU resident memory of the process."""

    median: float
    p20: float
    p80: float
    peak_mib: float


def measure(step: Step, device: str, repeats: int) -> Measurement:
    """Warm up, time `repeats` calls, and measure the memory of one more."""
    on_gpu = torch.device(device).type == "cuda"
    begin, done = time.perf_counter(), 0
    while done < WARM_UPS or (on_gpu and time.perf_counter() - begin < WARM_UP_SECONDS):
        step()
        done += 1
        if on_gpu:
            torch.cuda.synchronize()
    if on_gpu:
        return _quantiles(gpu_seconds(step, repeats), gpu_peak(step) / MIB)
    return _quantiles(_cpu_seconds(step, repeats), _cpu_peak(step) / MIB)


def measure_replayed(step: Step, repeats: int) -> Measurement:
    """As `measure`, for a step captured in a CUDA graph; memory is that of the capture."""
    step()
    step.clear()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    replayed = ReplayedStep(step)
    peak = torch.cuda.max_memory_allocated() - before
    for _ in range(3):
        replayed()
    return _quantiles(gpu_seconds(replayed, repeats), peak / MIB)


def _quantiles(seconds: list[float], peak_mib: float) -> Measurement:
    at = torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)
    median, p20, p80 = torch.tensor(seconds, dtype=torch.float64).quantile(at).tolist()
    return Measurement(median, p20, p80, peak_mib)


def _cpu_seconds(step: Step, repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return seconds


def gpu_seconds(step: Step | ReplayedStep, repeats: int) -> list[float]:
    """Time of each call between two events. Unlike a training loop, the host waits after each."""
    seconds = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return seconds


def gpu_peak(step: Step) -> int:
    step.clear()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


class Calls(NamedTuple):
    """Kernels launched by a step, and how often the host waits for the device."""

    launches: int
    waits: int


def count_calls(step: Step | ReplayedStep) -> Calls:
    """Count in a profile of one call. Use it after all timing: profiling slows later calls."""
    step()
    launches, waits = _profiled(step)
    _, own_waits = _profiled(lambda: None)
    return Calls(launches, max(waits - own_waits, 0))


def _profiled(work: Callable[[], object]) -> tuple[int, int]:
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    names: dict[str, Counter[str]] = {"CPU": Counter(), "CUDA": Counter()}
    for event in profile.events() or []:
        names.setdefault(event.device_type.name, Counter())[event.name] += 1
    kernels = sum(
        count for name, count in names["CUDA"].items() if not name.startswith(("Memcpy", "Memset"))
    )
    return kernels, sum(names["CPU"][name] for name in WAITS)


def _cpu_peak(step: Step) -> int:
    step.clear()
    # Freed memory that the C library keeps would hide the same amount of the step's memory.
    ctypes.CDLL(None).malloc_trim(0)
    before = _resident("VmRSS")
    # Resets VmHWM, the peak resident memory of this process, to the current value.
    Path("/proc/self/clear_refs").write_text("5")
    step()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
