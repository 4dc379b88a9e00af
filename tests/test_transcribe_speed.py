"""`scripts.transcribe_speed`: files are made and transcribed, and rows have their speed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from pruned_rnnt.data.tokens.tokenizer import UNKNOWN_ID
from pruned_rnnt.decode.search.greedy import greedy_search
from scripts import transcribe_speed
from tests.tiny_models import tiny_conformer, tiny_model
from tests.transcribe.random_model import save_random_model


def test_files_are_wav_of_15_to_30_seconds(tmp_path: Path) -> None:
    inputs, seconds = transcribe_speed.make_files(tmp_path, 3, (15.0, 30.0))
    lengths = [soundfile.info(item.path).duration for item in inputs]
    assert sum(lengths) == pytest.approx(seconds)
    assert all(15 <= length <= 30 for length in lengths)


def test_recordings_are_joined_and_cut(tmp_path: Path) -> None:
    recordings, made = tmp_path / "recordings", tmp_path / "made"
    recordings.mkdir()
    made.mkdir()
    for level in (0.25, 0.5):
        samples_S = np.full(16_000, level, dtype=np.float32)
        soundfile.write(recordings / f"{level}.wav", samples_S, 16_000, subtype="FLOAT")
    inputs, seconds = transcribe_speed.make_files(made, 2, (1.5, 1.5), recordings)
    assert seconds == 3
    for item in inputs:
        assert set(np.unique(soundfile.read(item.path)[0])) == {0.25, 0.5}
    with pytest.raises(ValueError, match=r"has 2\.0 s of speech, needs more than .*, 2\.5 s"):
        transcribe_speed.make_files(made, 2, (1.5, 2.5), recordings)
    with pytest.raises(ValueError, match=r"--recordings needs a folder with .*[.]wav files"):
        transcribe_speed.make_files(made, 2, (1.5, 2.5), tmp_path / "none")


def test_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transcribe_speed, "FOLDER", tmp_path)
    model = save_random_model(tmp_path / "model")
    options = ["--device", "cpu", "--files", "6", "--seconds", "1", "2", "--repeats", "1", "--keep"]
    transcribe_speed.main([str(model), "--batch-seconds", "4", *options])
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
        assert row["first_times_real_time"] > 0
        assert row["words_per_second"] > 0
        stages = row["stage_seconds"]
        assert list(stages)[:4] == ["reading", "features", "encoder", "search"]
        assert stages["alignment"] == 0
        assert min(stages["encoder"], stages["search"]) > 0


def test_random_models_emit_as_often_as_trained_ones() -> None:
    features_NTF = torch.randn(1, 1000, 80)
    model = tiny_model(tiny_conformer(), 20, kind="full").eval()
    with torch.no_grad():
        model.joiner.encoder_proj.weight *= 10
    transcribe_speed.emit_symbols(model, features_NTF)
    (found,) = greedy_search(
        model, *model.encode(features_NTF, torch.tensor([1000])), silent_symbols=[UNKNOWN_ID]
    )
    assert 15 <= len(found.symbols) <= 35
