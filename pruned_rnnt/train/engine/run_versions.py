"""The code that trained a run: RUN/versions.jsonl has a line for each start of the training."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from pruned_rnnt.system.code_version import code_version

_NAME = "versions.jsonl"


def add_version(folder: Path, step: int) -> None:
    """Append the code that trains from `step` on."""
    code = code_version()
    line = {
        "step": step,
        "version": code.version,
        "commit": code.commit,
        "torch": str(torch.__version__),
    }
    with (folder / _NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def versions(folder: Path) -> list[dict[str, str | int]]:
    """The lines in order; none for a run that has no such file, or a damaged one."""
    path = folder / _NAME
    if not path.is_file():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        return []
