"""The benchmark: all importable systems compute the same results, rows are complete, and beside the
committed ones: what is worse, and what cannot be compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from scripts.benchmark import __main__ as command
from scripts.benchmark import results
from scripts.benchmark.__main__ import SYSTEMS
from scripts.benchmark.cases import CASES, KINDS, Case, make_inputs, smaller
from scripts.benchmark.compare import compare, read_rows
from scripts.benchmark.peer_sources import SOURCES, compile_all
from scripts.benchmark.results import Row, append, committed
from scripts.benchmark.run import run_one
from scripts.benchmark.systems import System
from scripts.benchmark.systems_ours import OURS

CPU_CASES = {case.kind: smaller(case) for case in CASES.values() if case.device == "cpu"}
PEAK_PROGRAM = """
from scripts.benchmark.cases import Case, make_inputs
from scripts.benchmark.systems_ours import OURS
from scripts.benchmark.timing import measure

case = Case(name="peak", kind="full", device="cpu", N=2, T=100, U=40, V=500)
inputs = make_inputs(case)
measured = measure(OURS[0].kinds["full"](case, inputs), "cpu", repeats=2)
print(inputs.first.numel() * 4 / (1 << 20), measured.peak_mib)
"""
OLD = Row(
    case="step",
    what="N 30 T 437 float32",
    system="pruned_rnnt",
    version="0.1.0",
    median_ms=2.0,
    p20_ms=1.9,
    p80_ms=2.1,
    peak_mib=200.0,
    loss=984.0,
    repeats=20,
    machine="NVIDIA H200",
    torch="2.11.0+cu130",
    commit="aaaaaaa",
    date="2026-11-20",
    launches=50,
    waits=0,
)


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


def test_equal_rows_pass() -> None:
    found = compare([OLD, replace(OLD, median_ms=2.19)], [OLD], 0.1)
    assert found.passed
    assert found.lines() == [
        "passed: 1 rows compared, 0 measures worse, 0 better, 0 rows not compared"
    ]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"median_ms": 2.21}, "2 to 2.21 ms (+10%)"),
        ({"peak_mib": 221.0}, "200 to 221 MiB (+10%)"),
        ({"launches": 56}, "50 to 56 launches (+12%)"),
        ({"waits": 1}, "0 to 1 waits"),
        ({"loss": 990.0}, "loss 984.0 to 990.0"),
        ({"loss": float("nan")}, "loss 984.0 to nan"),
    ],
)
def test_each_measure_beyond_the_tolerance_fails(change: dict[str, float], named: str) -> None:
    new = replace(OLD, torch="2.13.0+cu130", commit="bbbbbbb", **change)
    found = compare([new], [OLD], 0.1)
    assert not found.passed
    (line,) = found.worse
    assert line.startswith("step, pruned_rnnt on NVIDIA H200: ")
    assert named in line
    assert "torch 2.11.0+cu130 to 2.13.0+cu130" in line
    assert "commit aaaaaaa to bbbbbbb" in line
    assert compare([new], [OLD], 0.3).passed == ("loss" not in change and "waits" not in change)


def test_the_newest_committed_row_counts() -> None:
    faster = replace(OLD, median_ms=1.0)
    assert compare([OLD], [faster, OLD], 0.1).passed
    assert not compare([OLD], [OLD, faster], 0.1).passed
    (line,) = compare([faster], [OLD], 0.1).better
    assert "2 to 1 ms (-50%)" in line


def test_other_cards_and_inputs_are_named_and_not_compared() -> None:
    for change, reason in (
        ({"machine": "NVIDIA H100"}, "committed rows are of NVIDIA H200"),
        ({"what": "N 8 float32"}, "inputs are N 8 float32, committed N 30"),
        ({"case": "new"}, "there is no committed row"),
    ):
        found = compare([replace(OLD, median_ms=99.0, **change)], [OLD], 0.1)
        assert not found.passed  # nothing was compared
        assert found.worse == ()
        assert reason in found.apart[0]
        assert compare([replace(OLD, **change), OLD], [OLD], 0.1).passed


def test_rows_of_other_packages_are_not_guarded() -> None:
    peer = replace(OLD, system="fast_rnnt")
    assert compare([OLD, replace(peer, median_ms=9.0)], [OLD, peer], 0.1).passed


def test_command_fails_and_names_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row for row in read_rows(committed("cuda")) if row.system == "pruned_rnnt"]
    new = tmp_path / "new.jsonl"
    for factor, code in ((1.0, 0), (2.0, 1)):
        new.unlink(missing_ok=True)
        append([replace(rows[-1], median_ms=factor * rows[-1].median_ms)], new)
        monkeypatch.setattr(sys, "argv", ["benchmark", "compare", str(new)])
        assert command.main() == code
        assert ("WORSE " + rows[-1].case in capsys.readouterr().out) == bool(code)
    new.write_text(json.dumps(asdict(OLD)) + '\n{"case": "x"}\n')
    assert command.main() == 2
    assert "new.jsonl:2 is no row" in capsys.readouterr().err
