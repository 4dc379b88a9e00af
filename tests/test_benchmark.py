"""The benchmark: all importable systems compute the same results, and rows are complete."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from scripts.benchmark import results
from scripts.benchmark.__main__ import SYSTEMS
from scripts.benchmark.cases import CASES, KINDS, Case, make_inputs, smaller
from scripts.benchmark.peer_sources import SOURCES, compile_all
from scripts.benchmark.run import run_one
from scripts.benchmark.systems import System
from scripts.benchmark.systems_ours import OURS

CPU_CASES = {case.kind: smaller(case) for case in CASES.values() if case.device == "cpu"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_case_is_on_the_cpu_table(kind: str) -> None:
    assert kind in CPU_CASES
    assert all(kind in system.kinds for system in OURS)


def loss_of(system: System, case: Case) -> float:
    inputs = make_inputs(case)
    step = system.kinds[case.kind](case, inputs)
    loss = float(step().double().mean())
    if not inputs.first.requires_grad:
        return loss
    assert inputs.first.grad is not None
    assert inputs.first.grad.isfinite().all()
    step.clear()
    assert inputs.first.grad is None
    return loss


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name != "pruned_rnnt"])
def test_systems_agree(name: str) -> None:
    system = SYSTEMS[name]
    reason = system.available() if "cpu" in system.devices else "not for the CPU"
    if reason is not None:
        pytest.skip(reason)
    for kind, builder in system.kinds.items():
        assert callable(builder)
        # The bands of a step may differ where windows hold the same mass.
        tolerance = 2e-2 if kind in ("step", "tdt_step") else 1e-4
        expected = loss_of(SYSTEMS["pruned_rnnt"], CPU_CASES[kind])
        assert loss_of(system, CPU_CASES[kind]) == pytest.approx(expected, rel=tolerance)


def test_row_is_complete_and_appended(tmp_path) -> None:
    row = run_one(CPU_CASES["full"], OURS[0], repeats=3)
    assert 0 < row.p20_ms <= row.median_ms <= row.p80_ms
    assert row.launches is row.waits is None
    assert all(value not in ("", None) for value in list(vars(row).values())[:-2])
    path = tmp_path / "new/cpu.jsonl"
    for _ in range(2):
        results.append([row], path)
    lines = path.read_text().splitlines()
    assert [results.Row(**json.loads(line)) for line in lines] == [row, row]
    assert row.case in results.format_table([row])


PEAK_PROGRAM = """
from scripts.benchmark.cases import Case, make_inputs
from scripts.benchmark.systems_ours import OURS
from scripts.benchmark.timing import measure

case = Case(name="peak", kind="full", device="cpu", N=2, T=100, U=40, V=500)
inputs = make_inputs(case)
measured = measure(OURS[0].kinds["full"](case, inputs), "cpu", repeats=2)
print(inputs.first.numel() * 4 / (1 << 20), measured.peak_mib)
"""


@pytest.mark.slow
def test_peak_memory_sees_what_a_step_allocates() -> None:
    # In a separate process, as memory that earlier tests have freed might be reused.
    done = subprocess.run(
        [sys.executable, "-c", PEAK_PROGRAM], capture_output=True, text=True, check=True
    )
    gradient_mib, peak_mib = map(float, done.stdout.split())
    assert gradient_mib <= peak_mib < 3 * gradient_mib


def test_missing_archives_are_named(tmp_path) -> None:
    reasons = compile_all(tmp_path, tmp_path / "build")
    assert set(reasons) == {source.package for source in SOURCES}
    assert all(f"no {name}-*.tar.gz in" in reason for name, reason in reasons.items())


def test_both_tables_have_the_same_kinds_of_cases() -> None:
    kinds = [{case.kind for case in CASES.values() if case.device == d} for d in ("cpu", "cuda")]
    assert kinds == [set(KINDS), set(KINDS)]
