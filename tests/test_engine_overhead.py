"""The script that measures the engine, on a model and batches that take no time."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.engine_overhead import main


def test_a_row_is_measured_and_kept(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    row = main(
        [
            "--steps=3",
            f"--json={rows}",
            "data.max_duration=20",
            "model.encoder.layers=1",
            "model.encoder.dim=16",
            "model.encoder.heads=2",
            "model.encoder.feedforward_dim=16",
            "model.encoder.subsampling_channels=2",
            "model.predictor.dim=8",
            "model.joiner_dim=8",
            "train.device=cpu",
        ]
    )
    assert json.loads(rows.read_text()) == row
    assert row["world_size"] == 1
    assert row["forward_backward_seconds"] > 0
    assert row["bare_step_seconds"] > 0
    assert row["overhead"] > -1
    assert "efficiency" not in row
