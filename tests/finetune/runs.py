"""Arguments of a tiny fine-tuning, and the message of one that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from pruned_rnnt.cli import main

OTHER_WORDS = ("green", "black", "white")


def command(root: Path, run: Path, *settings: str, source: str = "run") -> list[str]:
    steps = [f"train.folder={run}", "train.steps=4", "train.log_every=1", "train.device=cpu"]
    return ["finetune", str(root / source), str(root / "new"), *steps, *settings]


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int) -> str:
    capsys.readouterr()
    assert main(arguments) == code
    return capsys.readouterr().err.splitlines()[-1]
