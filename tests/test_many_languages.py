"""Many languages in one model through the command line, from the table to the exported model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pruned_rnnt.cli import main as pruned_rnnt
from pruned_rnnt.data.input.filters import cut_language
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from tests.data.locale_texts import LOCALES
from tests.data.recorded_speech import write_audio

TINY = [
    "train.steps=4",
    "train.validate_every=4",
    "train.log_every=1",
    "train.device=cpu",
    "data.num_workers=0",
    "data.max_duration=30",
    "data.num_buckets=2",
    "model.encoder.layers=1",
    "model.encoder.dim=32",
    "model.encoder.heads=2",
    "model.encoder.feedforward_dim=32",
    "model.encoder.kernel_size=5",
    "schedule.warm_up_steps=2",
    "loss.warm_up_steps=2",
]


def write_source(folder: Path) -> Path:
    """The sample of Common Voice if the test data are there, else noise with a text each."""
    data = os.environ.get("PRUNED_RNNT_TEST_DATA")
    if data and (Path(data) / "common_voice_sample").is_dir():
        return Path(data) / "common_voice_sample"
    for locale, texts in LOCALES.items():
        rows = ["client_id\tpath\tsentence\tlocale"]
        for index, text in enumerate(texts * 3):
            write_audio(folder / locale / "clips" / f"{locale}{index}.wav", 3.0 + 0.1 * index)
            rows.append(f"{locale}{index}\t{locale}{index}.wav\t{text}\t{locale}")
        table = folder / locale / "validated.tsv"
        table.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


@pytest.mark.slow
def test_all_locales_in_one_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source, run = write_source(tmp_path / "cv"), tmp_path / "run"
    prepare = ["prepare", "own", str(source), "--output", "many", "--byte-fallback"]
    options = ["--language-tags", "--vocab-size", "600", "--case", "lower"]
    assert pruned_rnnt([*prepare, *options, "--punctuation", "remove"]) == 0
    folder = PreparedFolder(tmp_path / "many")
    languages = {locale.lower() for locale in LOCALES}
    for split in ("train", "dev", "test"):
        assert {cut_language(cut) for cut in folder.cuts(split)} == languages
    assert set(folder.tokenizer().languages) == languages
    assert "without a token" not in capsys.readouterr().out

    settings = ["data.path=many", f"train.folder={run}", *TINY]
    assert pruned_rnnt(["train", "--config", "own", *settings]) == 0
    assert pruned_rnnt(["decode", str(run)]) == 0
    shown = capsys.readouterr().out
    assert ": CER " in shown
    (table,) = (run / "results").glob("languages-*.tsv")
    rows = [line.split("\t") for line in table.read_text(encoding="utf-8").splitlines()[1:]]
    assert {row[0] for row in rows} == languages
    metrics = {row[0]: row[2] for row in rows}
    assert {name for name, metric in metrics.items() if metric == "CER"} == {"ja", "th", "zh-cn"}

    assert pruned_rnnt(["report", str(run)]) == 0
    assert ">By language<" in (run / "report.html").read_text(encoding="utf-8")
    pytest.importorskip("onnxruntime")
    audio = str(next(source.glob("th/clips/*")))
    assert pruned_rnnt(["export", str(run)]) == 0
    # Texts may differ, because an untrained model has nearly equal scores; test_exported_texts
    # compares them.
    for model in (run, run / "export" / "onnx"):
        capsys.readouterr()
        assert pruned_rnnt(["transcribe", str(model), audio, "--format", "jsonl"]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        assert json.loads(line)["file"] == audio
