"""The kernels of one step of a benchmark case, by their time on the GPU.

    python -m scripts.kernel_times cuda-tdt-step-v1025-bf16
    python -m scripts.kernel_times cuda-step-b30 --shapes FILE.npz --rows 60

Prints a row for each kernel: time and launches in a step, forward and backward together.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch.profiler import ProfilerActivity, profile

from scripts.benchmark.cases import CASES, CUDA_CASES, SHAPES_VARIABLE
from scripts.benchmark.run import make_step
from scripts.benchmark.systems_ours import OURS

STEPS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("case", choices=[x.name for x in CUDA_CASES])
    parser.add_argument("--shapes", help="lengths of real utterances, for the cases that need them")
    parser.add_argument("--rows", type=int, default=40)
    options = parser.parse_args()
    if options.shapes:
        os.environ[SHAPES_VARIABLE] = options.shapes
    case = CASES[options.case]
    step = make_step(case, OURS[0])
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    kernels = [x for x in profiler.key_averages() if x.device_time_total > 0]
    kernels.sort(key=lambda x: -x.device_time_total)
    total_us = sum(x.device_time_total for x in kernels) / STEPS
    launches = sum(x.count for x in kernels) / STEPS
    print(f"{case.name}: {launches:.0f} kernels and copies, {total_us / 1e3:.3f} ms on the GPU")
    for kernel in kernels[: options.rows]:
        us = kernel.device_time_total / STEPS
        print(f"{us:10.1f} us  {kernel.count / STEPS:6.1f}  {kernel.key[:110]}")


if __name__ == "__main__":
    main()
