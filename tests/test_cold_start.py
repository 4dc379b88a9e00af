"""`scripts.cold_start`: each process runs twice, with a cache of its own, and has a row."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scripts.cold_start.__main__ import main


def test_rows_of_whole_processes(tmp_path: Path) -> None:
    rows = main(["help", "--folder", str(tmp_path), "--json", str(tmp_path / "rows.jsonl")])
    assert [(row["process"], row["run"]) for row in rows] == [
        ("help", "first"),
        ("help", "second"),
        ("import numpy", "first"),
        ("import numpy", "second"),
    ]
    assert all(row["wall_s"] > 0 and "failed" not in row for row in rows)
    saved = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in saved] == rows


def test_a_failed_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRUNED_RNNT_BACKEND", "none")  # raises at the first use of a loss
    (tmp_path / "one").mkdir()
    rows = main(["transcribe", "--folder", str(tmp_path), "--audio", "one"])
    assert [row["failed"] != 0 for row in rows] == [True, True]


def test_training_without_shapes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--folder", str(tmp_path)])


@pytest.mark.slow
def test_first_steps_of_a_training(tmp_path: Path) -> None:
    shapes = tmp_path / "shapes.npz"
    frames = np.random.default_rng(0).integers(10, 20, 300)
    np.savez(shapes, frames=frames, tokens=frames // 5)
    width = ["model.encoder.dim=16", "model.encoder.feedforward_dim=16"]
    settings = ["train.precision=float32", "model.encoder.layers=1", *width]
    sizes = ["--steps", "2", "--seconds", "2", "--models", "conformer"]
    files = ["--folder", str(tmp_path), "--shapes", str(shapes)]
    rows = main(["train", *files, *sizes, "--overrides", *settings])
    for row in rows:
        assert 0 < row["ready_s"] < row["step_1_s"] < row["step_2_s"] <= row["wall_s"]
