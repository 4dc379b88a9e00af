"""The table of decoding speeds: a row for every search and batch size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import decoding_speed
from tests.decode.search_model import make_model


def test_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decoding_speed, "random_model", lambda *sizes: make_model())
    path = tmp_path / "rows.jsonl"
    options = ["--devices", "cpu", "--batch-sizes", "1", "3", "--seconds", "0.5", "--repeat", "1"]
    decoding_speed.main([*options, "--json", str(path)])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    methods = ["greedy", "modified_beam", "hotwords", "ngram", "lm"]
    expected = [(method, size) for size in (1, 3) for method in methods]
    assert [(row["method"], row["batch_size"]) for row in rows] == expected
    for row in rows:
        milliseconds = row["encoder_ms"] + row["search_ms"]
        audio_ms = row["batch_size"] * 500
        factor = row["real_time_factor"]
        # Both parts are rounded to 0.1 ms, the factor to 6 digits, and its inverse to 0.1.
        assert factor * audio_ms == pytest.approx(milliseconds, abs=0.11)
        rounding = 0.051 + 0.51e-6 / factor**2
        assert row["times_real_time"] == pytest.approx(1 / factor, rel=0, abs=rounding)
        assert row["parameters"] > 0
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + len(rows)
    assert len({line.count("|") for line in table}) == 1
    assert table[2].startswith("| CPU | greedy | 1 | ")
