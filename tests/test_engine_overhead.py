"""The script that measures the overhead of the training engine, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.engine_overhead import main

pytestmark = pytest.mark.slow

TINY = [
    "--steps=2",
    "--turns=2",
    "data.max_duration=20",
    "model.encoder.layers=1",
    "model.encoder.dim=16",
    "model.encoder.heads=2",
    "model.encoder.feedforward_dim=16",
    "model.encoder.subsampling_channels=2",
    "model.predictor.dim=8",
    "model.joiner_dim=8",
    "train.device=cpu",
    "train.log_every=2",
]


def test_row_is_measured_and_appended(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    row = main([*TINY, "--profile", f"--json={rows}"])
    assert json.loads(rows.read_text()) == row
    assert row["world_size"] == 1
    assert row["forward_backward_step_seconds"] > 0
    assert row["bare_step_seconds"] > 0
    assert row["overhead"] > -1
    lowest, highest = row["range"]["engine_step_seconds"]
    assert 0 < lowest <= row["engine_step_seconds"] <= highest
    assert "efficiency" not in row
    assert row["gpu_launches"] == 0


def test_two_processes_are_measured_side_by_side_and_together(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = ["-m", "scripts.engine_overhead", *TINY, f"--json={rows}"]
    root = Path(__file__).parent.parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, *launch, *script]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = rows.read_text().splitlines()
    row = json.loads(line)
    assert row["world_size"] == 2
    together = row["together_step_seconds"]
    low, high = row["range"]["efficiency"]
    assert 0 < low <= row["efficiency"] <= high
    alone_low, alone_high = row["range"]["engine_step_seconds"]
    assert alone_low / row["range"]["together_step_seconds"][1] <= high
    assert low <= alone_high / row["range"]["together_step_seconds"][0]
    assert together > 0
    assert row["side_by_side_efficiency"] > 0
