"""`pruned-rnnt check` as a command: what it prints, writes and returns, and the next process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pruned_rnnt.ops.common.native import has_native_kernel
from pruned_rnnt.selfcheck import check_command, speed
from pruned_rnnt.selfcheck.check_command import pick_device, run_check
from pruned_rnnt.selfcheck.problem import Finding
from pruned_rnnt.selfcheck.speed import measure_speeds
from pruned_rnnt.system import switched_kernels
from pruned_rnnt.system.optional_packages import PACKAGES_OF_EXTRA
from pruned_rnnt.system.switched_kernels import ENCODERS, GRAPHS, LOSSES, read_switches
from pruned_rnnt.system.usage_errors import UsageError
from tests.selfcheck.fakes import WRONG_GRADIENT, cpu
from tests.torch_forks import run_with_torch

# Runs the command with one problem of the losses, and prints its exit code.
ONE_LOSS = """
import sys
from pruned_rnnt.system import switched_kernels
ignore = switched_kernels.ignore_switches

def ignore_and_take_one():
    ignore()
    from pruned_rnnt.selfcheck import check_command, losses
    problems = losses.loss_problems()[:1]
    losses.loss_problems = lambda: problems
    check_command._checks = lambda device: {"Losses": lambda: losses.check_losses(device)}
    check_command.measure_speeds = lambda device: ()

switched_kernels.ignore_switches = ignore_and_take_one
from pruned_rnnt.cli import main
print("exit code", main(["check", "--device", "cpu", *sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not has_native_kernel("log_probs", "cpu"), reason="the CPU library is not built"
)
def test_a_wrong_gradient_is_found_switched_and_switched_back(tmp_path: Path) -> None:
    home = {"XDG_CONFIG_HOME": str(tmp_path)}
    report = tmp_path / "check.json"
    code = WRONG_GRADIENT + ONE_LOSS
    out = run_with_torch(code, "--write", "--json", str(report), **home)
    assert out.stdout.endswith("exit code 1\n"), out
    assert "3 of 3 comparisons are wrong" in out.stdout
    assert "the kernels of log_probs_backward differ from plain torch" in out.stdout
    assert "PRUNED_RNNT_BACKEND=fallback" in out.stdout
    assert "losses on cpu run in plain torch in later processes" in out.stdout
    assert json.loads(report.read_text())["wrong"] == 3

    state = "import pruned_rnnt; print(pruned_rnnt.backend_summary('cpu'))"
    after = run_with_torch(state, **home)
    assert "log_probs_backward differ" in after.stdout
    assert after.stdout.startswith("fallback (switched off")
    assert "log_probs_backward differ" in after.stderr

    # Without the fault: the check still runs the kernels, and switches them back.
    again = run_with_torch(ONE_LOSS, "--write", **home).stdout
    assert again.endswith("exit code 0\n"), again
    assert "kernels on cpu   native" in again
    assert "plain torch instead of the losses" in again
    assert run_with_torch(state, **home).stdout.startswith("native")


@pytest.mark.slow
def test_the_whole_check_needs_torch_alone(tmp_path: Path) -> None:
    packages = {name for names in PACKAGES_OF_EXTRA.values() for name in names} | {"triton"}
    code = f"""
import sys
sys.modules.update(dict.fromkeys({sorted(packages)}))
from pruned_rnnt.cli import main
print("exit code", main(["check", "--device", "cpu"]))
"""
    out = run_with_torch(code, XDG_CONFIG_HOME=str(tmp_path))
    assert out.stdout.endswith("exit code 0\n"), out
    assert "right  training step resumed" in out.stdout


@pytest.mark.gpu
def test_the_whole_check_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_check(torch.device("cuda", 0), write=False, report=None), capsys.readouterr().out
    assert "in a graph: error" in capsys.readouterr().out


def found(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    checks = {"All": lambda: iter(findings)}
    monkeypatch.setattr(check_command, "_checks", lambda device: checks)
    monkeypatch.setattr(check_command, "measure_speeds", lambda device: ())


def wrong(part: str, *, plain_is_right: bool = True) -> Finding:
    return Finding(
        part=part, what="x", error=1.0, failure="it differs", plain_is_right=plain_is_right
    )


@pytest.mark.parametrize(
    ("finding", "advice", "switched"),
    [
        (wrong(LOSSES), "PRUNED_RNNT_BACKEND=fallback", [LOSSES]),
        (wrong(ENCODERS), "train.fused_kernels=off", [ENCODERS]),
        (wrong(GRAPHS), "train.cuda_graphs=off", [GRAPHS]),
        (wrong(ENCODERS, plain_is_right=False), "another version of torch", []),
        (wrong("training"), "gives other bits", []),
    ],
)
def test_advice_and_switch_of_each_part(
    finding: Finding,
    advice: str,
    switched: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    if finding.part == LOSSES and not has_native_kernel("log_probs", "cpu"):
        pytest.skip("the CPU library is not built")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    right = Finding(part=ENCODERS, what="y", error=0.0, tolerance=1.0)
    found(monkeypatch, right, Finding(part=GRAPHS, what="z", note="left out"), finding)
    assert not run_check(cpu(), write=True, report=None)
    out = capsys.readouterr().out
    assert "1 of 2 comparisons are wrong" in out
    assert advice in out
    assert [x.part for x in read_switches()] == switched
    assert ("nothing to switch" in out) == (not switched)
    found(monkeypatch, finding, right)
    assert not run_check(cpu(), write=False, report=None)
    assert ("`pruned-rnnt check --write` switches" in capsys.readouterr().out) == (
        finding.plain_is_right
    )


def test_gpus_of_another_kind_stay_switched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    names = ["NVIDIA H100", "NVIDIA A10"]
    monkeypatch.setattr(switched_kernels, "device_names", lambda device: names)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert "run in plain torch" in check_command._written([wrong(ENCODERS)], second)
    right = Finding(part=ENCODERS, what="y", error=0.0, tolerance=1.0)
    check_command._written([right], first)
    assert [(x.part, x.name) for x in read_switches()] == [(ENCODERS, "NVIDIA A10")]
    check_command._written([right], second)
    assert read_switches() == []


@pytest.mark.parametrize(("error", "written"), [(float("inf"), "infinite"), (float("nan"), "NaN")])
def test_infinite_errors_in_json(
    error: float, written: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    found(monkeypatch, Finding(part=LOSSES, what="x", error=error, failure="NaN"))
    run_check(cpu(), write=False, report=tmp_path / "r.json")
    values = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    assert values["comparisons"][0]["error"] == written
    assert values["machine"]["torch"] == torch.__version__


def test_errors_outside_of_the_comparisons_do_not_end_the_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a device that a kernel left unusable."""

    def fails(*_: object) -> Iterator[Any]:
        raise RuntimeError("an illegal memory access\nmore")
        yield

    checks = {"First": lambda: iter([wrong(LOSSES)]), "Second": fails}
    monkeypatch.setattr(check_command, "_checks", lambda device: checks)
    monkeypatch.setattr(check_command, "measure_speeds", fails)
    assert not run_check(cpu(), write=False, report=tmp_path / "r.json")
    out = capsys.readouterr().out
    assert "2 of 2 comparisons are wrong" in out
    assert "WRONG  Second RuntimeError: an illegal memory access\n" in out
    assert "  not measured: RuntimeError: an illegal memory access\n" in out
    assert "- device: no kernel of this package is the reason, or it left the device" in out
    assert json.loads((tmp_path / "r.json").read_text())["wrong"] == 2


def test_files_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found(monkeypatch, wrong(ENCODERS))
    with pytest.raises(UsageError, match=r"--json .*there is no folder"):
        run_check(cpu(), write=False, report=tmp_path / "none" / "r.json")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"file.pruned_rnnt.* nothing is switched: set XDG_CONFIG"):
        run_check(cpu(), write=True, report=None)


@pytest.mark.parametrize("device", ["tpu", "cpu:1", "cpu:", "cuda:x", "cuda:99"])
def test_no_such_device(device: str) -> None:
    with pytest.raises(UsageError, match=f"--device is '{device}'"):
        pick_device(device)


def test_speeds_beside_the_rows_of_the_same_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = (
        speed.Case("cpu-full", "full", 1, 5, 2, 4),
        speed.Case("cpu-step", "step", 1, 5, 2, 4, 8),
    )
    monkeypatch.setitem(speed._CASES, "cpu", small)
    full, step = measure_speeds(cpu(), tmp_path)
    assert full.committed is None
    assert full.milliseconds > 0
    assert "benchmark" not in full.line()
    names = ((speed.cpu_name(), "pruned_rnnt", 3.0), ("other", "pruned_rnnt", 5.0))
    rows = [{"case": "cpu-full", "machine": m, "system": s, "median_ms": ms} for m, s, ms in names]
    (tmp_path / "cpu.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    full, step = measure_speeds(cpu(), tmp_path)
    assert full.committed == 3.0
    assert full.line().endswith(" ms, benchmark 3.00 ms")
    assert step.committed is None
