"""Measure one system on one case, and count its kernel launches and waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from scripts.benchmark.cases import Case, make_inputs
from scripts.benchmark.results import Row, commit, machine
from scripts.benchmark.systems import ReplayedStep, Step, System
from scripts.benchmark.timing import count_calls, measure, measure_replayed


def make_step(case: Case, system: System) -> Step:
    step = system.kinds[case.kind](case, make_inputs(case))
    step.autocast(getattr(torch, case.autocast) if case.autocast else None)
    torch.set_float32_matmul_precision("high" if case.tf32 else "highest")
    return step


def run_one(case: Case, system: System, repeats: int) -> Row:
    """Measure one system on one case in this process."""
    step = make_step(case, system)
    # For `bounds`, the mean start of the band.
    loss = float(step().double().mean())
    if system.replayed:
        measured = measure_replayed(step, repeats)
    else:
        measured = measure(step, case.device, repeats)
    del step
    if case.device == "cuda":
        torch.cuda.empty_cache()
    return Row(
        case=case.name,
        what=case.describe(),
        system=system.name,
        version=system.version(),
        median_ms=round(1e3 * measured.median, 4),
        p20_ms=round(1e3 * measured.p20, 4),
        p80_ms=round(1e3 * measured.p80, 4),
        peak_mib=round(measured.peak_mib, 1),
        loss=round(loss, 4),
        repeats=repeats,
        machine=machine(case.device),
        torch=torch.__version__,
        commit=commit(),
        date=time.strftime("%Y-%m-%d"),
    )


def with_call_counts(
    measured: list[tuple[Row, Case, System]], log: Callable[[str], None]
) -> list[tuple[Row, Case, System]]:
    """The rows with launches and waits added, if they can be counted."""
    result = []
    for row, case, system in measured:
        try:
            step = make_step(case, system)
            calls = count_calls(ReplayedStep(step) if system.replayed else step)
            row = replace(row, launches=calls.launches, waits=calls.waits)
            del step
            torch.cuda.empty_cache()
        except Exception as error:  # of any package, or of the profiler
            log(f"{case.name}: calls of {system.name} not counted: {str(error).splitlines()[:1]}")
        result.append((row, case, system))
    return result
