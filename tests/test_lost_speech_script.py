"""`scripts.lost_speech` measures every kind of model, and counts what was lost and marked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.export.model_file import ModelFile
from pruned_rnnt.export.onnx_folder import OnnxOptions, export_onnx
from pruned_rnnt.transcribe.lost_speech import Mark
from scripts import lost_speech
from scripts.lost_speech import MarkedText, Spoken, TimedReference, score
from tests.pretrained.saved_models import make_model, make_tokenizer, save_file, save_icefall
from tests.tiny_models import tiny_conformer, tiny_model, zipformer_of_icefall
from tests.transcribe.random_model import babble


def spoken(seconds: float) -> Spoken:
    """A word each second, from 0.2 to 0.8 s of it."""
    words = [TimedReference("one", n + 0.2, n + 0.8) for n in range(int(seconds))]
    return Spoken(babble(seconds), tuple(words))


def tiny(folder: Path, tokenizer: Tokenizer, **loss: Any) -> Path:
    return save_file(
        folder, tiny_model(tiny_conformer(causal=True), len(tokenizer), **loss), tokenizer
    )


def icefall(folder: Path, tokenizer: Tokenizer) -> Path:
    return save_icefall(folder, make_model(tokenizer, zipformer_of_icefall(causal=True)), tokenizer)


def onnx(folder: Path, tokenizer: Tokenizer) -> Path:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    model = tiny_model(tiny_conformer(), len(tokenizer))
    export_onnx(ModelFile(model, tokenizer), folder, OnnxOptions(), "test")
    return folder


BEAM = "decode.method=modified_beam"


def tdt(folder: Path, tokenizer: Tokenizer) -> Path:
    return tiny(folder, tokenizer, durations=(0, 1, 2, 4))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (tiny, []),
        (tiny, [BEAM]),
        (tiny, ["--live"]),
        (tiny, [BEAM, "--live", "--lost-speech", "ignore"]),
        (tdt, []),
        pytest.param(tdt, [BEAM], marks=pytest.mark.slow),
        (tdt, ["--live"]),
        (icefall, []),
        pytest.param(onnx, [], marks=pytest.mark.slow),
    ],
)
def test_every_kind_of_model_is_measured(
    make: Any, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(tmp_path / "model", make_tokenizer())
    monkeypatch.setattr(lost_speech, "read_utterances", lambda *_: [spoken(1.0), spoken(1.2)])
    rows = tmp_path / "rows.jsonl"
    sizes = ["--padding", "--lengths", "--data", "data", "--rows", str(rows)]
    lost_speech.main([str(model), *options, *sizes])
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len({row["condition"] for row in found}) == len(found) == 4
    for row in found:
        assert row["words"] == 2
        assert row["errors"] > 0
        assert row["unmarked"] <= row["lost"]
        assert row["live"] == ("--live" in options)
        assert row["settings"] == [each for each in options if "=" in each]


def test_lost_words_and_marks_are_counted() -> None:
    recording = spoken(8.0)

    def counts(text: str, *spans: tuple[float, float]) -> tuple[int, int, int, int]:
        return score(
            recording, MarkedText(text, [Mark("speech without text", *span) for span in spans])
        )

    assert counts(" ".join(["one"] * 8)) == (0, 0, 0, 0)
    assert counts(" ".join(["one"] * 8), (1.0, 1.5)) == (0, 0, 0, 1)
    assert counts("") == (8, 1, 1, 0)
    assert counts("", (0.3, 7.7)) == (8, 1, 0, 0)
    assert counts("two", (20.0, 21.0)) == (8, 1, 1, 1)
