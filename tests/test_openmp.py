"""The command line limits how long OpenMP's threads spin, before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys
import pruned_rnnt.cli
try:
    pruned_rnnt.cli.main(["--version"])
except SystemExit:
    pass
print("torch" in sys.modules, os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, "1000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, "None"),
    ],
)
def test_commands_limit_spinning_unless_the_user_sets_a_limit(
    chosen: dict[str, str], expected: str
) -> None:
    environment = {k: v for k, v in os.environ.items() if "GOMP" not in k and "OMP_" not in k}
    result = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**environment, **chosen},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[-1] == f"False {expected}"
