"""The script that times the loader runs over what there is, and says what there is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pruned_rnnt.cli import main as pruned_rnnt
from scripts import loader_speed
from tests.data.recorded_speech import write_audio
from tests.data.spoken_corpus import make_corpus


def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--data", str(folder), "--seconds", "0.05", "--max-duration", "10"]
    monkeypatch.setattr(sys, "argv", ["loader_speed", *options])
    loader_speed.main()


def test_stored_and_waveform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    run(make_corpus(tmp_path / "corpus", 12), monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == [
        "stored", "stored", "waveform", "waveform", "sampling",
    ]  # fmt: skip


def test_without_stored_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    rows = []
    for index in range(6):
        write_audio(tmp_path / f"u{index}.wav", 2.0)
        rows.append(f"u{index}.wav\tgo\n")
    (tmp_path / "table.tsv").write_text("".join(rows))
    arguments = ["prepare", "own", str(tmp_path / "table.tsv"), "--features", "waveform"]
    options = ["--output", str(tmp_path / "data"), "--tokens", "char"]
    assert pruned_rnnt([*arguments, *options]) == 0
    capsys.readouterr()
    run(tmp_path / "data", monkeypatch)
    shown = capsys.readouterr().out
    assert "was not prepared for data.features=stored" in shown
    assert shown.count("\nwaveform") == 2
