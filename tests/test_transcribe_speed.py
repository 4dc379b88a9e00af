"""`scripts.transcribe_speed`: files are made and transcribed, and rows have their speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import soundfile

from scripts import transcribe_speed
from tests.transcribe.random_model import save_random_model


def test_files_are_wav_of_15_to_30_seconds(tmp_path: Path) -> None:
    inputs, seconds = transcribe_speed.make_files(tmp_path, 3)
    lengths = [soundfile.info(item.path).duration for item in inputs]
    assert sum(lengths) == pytest.approx(seconds)
    assert all(15 <= length <= 30 for length in lengths)


def test_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transcribe_speed, "_SHORTEST", 1.0)
    monkeypatch.setattr(transcribe_speed, "_LONGEST", 2.0)
    monkeypatch.setattr(transcribe_speed, "FOLDER", tmp_path)
    model = save_random_model(tmp_path / "model")
    options = ["--device", "cpu", "--files", "6", "--repeats", "1", "--keep"]
    transcribe_speed.main([str(model), "decode.batch_seconds=4", *options])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["method"] for row in rows] == ["greedy", "modified_beam"]
    kept = (tmp_path / "transcribe.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in kept] == rows
    for row in rows:
        assert row["files"] == 6
        assert 6 <= row["audio_seconds"] <= 12
        assert row["batch_seconds"] == 4
        assert row["settings"] == ["decode.batch_seconds=4"]
        assert 0 < row["times_real_time"] < row["reading_times_real_time"]
        assert row["words_per_second"] > 0
