"""The scripts that build and check wheels: they complain about wrong kernels and wrong losses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import pruned_rnnt
from scripts import build_wheels, wheel_check


def test_losses_equal_those_of_the_recursion(capsys: pytest.CaptureFixture[str]) -> None:
    assert wheel_check.check_losses("cpu") == []
    assert capsys.readouterr().out.count("reference 9.860114") == 2


@pytest.mark.parametrize("name", ["rnnt_loss", "rnnt_loss_pruned"])
def test_wrong_losses_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(pruned_rnnt, name)

    def wrong(*arguments: Any) -> Any:
        return 1.0001 * right(*arguments)

    monkeypatch.setattr(pruned_rnnt, name, wrong)
    (complaint,) = wheel_check.check_losses("cpu")
    assert "is not that of the reference" in complaint


def test_kernels_must_be_those_of_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(pruned_rnnt.__file__).parent / "lib/libpruned_rnnt_cpu.so"
    for summary, complaints in (
        (f"native ({own})", 0),
        ("native (/elsewhere/libpruned_rnnt_cpu.so)", 1),
        ("fallback (not built: no C++ compiler found)", 1),
    ):
        monkeypatch.setattr(pruned_rnnt, "backend_summary", lambda _, found=summary: found)
        assert len(wheel_check.check_backend("cpu")) == complaints


def test_environments_get_no_settings_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    python = Path(sys.executable)
    for name in ("PRUNED_RNNT_LIBRARY_DIR", "PYTHONPATH"):
        monkeypatch.setenv(name, "/nowhere")
        code = f"import os; print(os.environ.get({name!r}))"
        assert build_wheels.run(python, "-c", code).strip() == "None"
    with pytest.raises(SystemExit, match="failed with exit code 3"):
        build_wheels.run(python, "-c", "raise SystemExit(3)")
