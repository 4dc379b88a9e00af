"""The table of joiner evaluations and times of greedy search."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pruned_rnnt.cli import main
from pruned_rnnt.train.run import load_model, run_config
from scripts import greedy_steps
from tests.tiny_corpus import tiny_overrides


@pytest.mark.slow
def test_rows(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for name, durations in (("plain", "[]"), ("tdt", "[2,1]")):
        runs.append(tmp_path / name)
        settings = [f"loss.durations={durations}", "train.steps=1", "train.validate_every=100"]
        assert main(["train", *tiny_overrides(corpus, runs[-1], *settings)]) == 0
    rows_path = tmp_path / "rows.jsonl"
    arguments = ["greedy_steps", *map(str, runs), "--repeat", "1", "--json", str(rows_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert greedy_steps.main() == 0
    plain, tdt = (json.loads(line) for line in rows_path.read_text().splitlines())
    # A model without durations emits one symbol per frame at most.
    assert plain["evaluations"] == plain["frames"] == tdt["frames"]
    assert tdt["frames"] / 2 <= tdt["evaluations"] <= tdt["frames"]
    assert load_model(run_config(runs[1])).model.loss_config.durations == (2, 1)
    for row in (plain, tdt):
        assert row["share"] == pytest.approx(row["evaluations"] / row["frames"], abs=1e-3)
        assert min(row["encoder_ms"], row["search_ms"], row["rtf"]) > 0
