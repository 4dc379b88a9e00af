"""The script that measures the speed of the loader, on prepared folders of every kind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pruned_rnnt.cli import main as pruned_rnnt
from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.data.input.datamodule import DataModule
from scripts import loader_speed
from tests.data.recorded_speech import write_audio
from tests.data.spoken_corpus import make_corpus

OPTIONS = ["--max-duration", "10", "--workers", "1"]


def prepare(folder: Path, *options: str) -> Path:
    rows = []
    for index in range(6):
        write_audio(folder / f"u{index}.wav", 2.0)
        rows.append(f"u{index}.wav\tgo\n")
    (folder / "table.tsv").write_text("".join(rows))
    arguments = ["prepare", "own", str(folder / "table.tsv"), "--tokens", "char"]
    assert pruned_rnnt([*arguments, *options, "--output", str(folder / "data")]) == 0
    return folder / "data"


@pytest.mark.slow
def test_stored_and_waveform(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, path = make_corpus(tmp_path / "corpus", 12), tmp_path / "rows.jsonl"
    rows = loader_speed.main(["--data", str(folder), *OPTIONS, "--json", str(path)])
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
    assert [(row["storage"], row["features"], row["augmentation"]) for row in rows] == [
        ("files", "stored", "none"),
        ("files", "stored", "SpecAugment"),
        ("files", "waveform", "none"),
        ("files", "waveform", "SpecAugment"),
    ]
    for row in rows:
        assert row["clock"] > 0
        assert row["workers"] - 1 < 8000 / row["worker"] <= row["workers"]
        assert row["cores"] == pytest.approx(8000 / row["worker"] + 8000 / row["main"])
    assert len(capsys.readouterr().out.splitlines()) == 5


@pytest.mark.parametrize("features", ["stored", "waveform"])
def test_shar(features: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = prepare(tmp_path, "--shar", "--features", features)
    rows = loader_speed.main(["--data", str(folder), *OPTIONS])
    other = {"stored": "waveform", "waveform": "stored"}[features]
    assert f"was not prepared for data.features={other}" in capsys.readouterr().out
    assert [(row["storage"], row["features"]) for row in rows] == [("shar", features)] * 2


def test_the_time_of_all_epochs_is_measured(tmp_path: Path) -> None:
    folder = make_corpus(tmp_path / "corpus", 12)
    config = DataConfig(path=str(folder), max_duration=10.0, num_workers=1)
    loader = DataModule(config).train_loader()
    one, three = (loader_speed.load_epochs(loader, 0, count) for count in (1, 3))
    assert three.audio == pytest.approx(3 * one.audio)
    here = DataModule(replace(config, num_workers=0)).train_loader()
    assert one.audio == pytest.approx(sum(sum(batch.durations) for batch in here))
    assert min(one.main, one.workers) > 0


def test_no_worker_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        loader_speed.main(["--data", "no_data", "--workers", "0"])
    assert "--workers is 0, needs at least 1" in capsys.readouterr().err
