"""`scripts.lost_speech` measures every kind of model, and counts what was lost and marked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.word_times import TimedWord
from pruned_rnnt.export.model_file import ModelFile
from pruned_rnnt.export.onnx_folder import OnnxOptions, export_onnx
from pruned_rnnt.transcribe.lost_speech import Mark
from scripts import lost_speech
from scripts.lost_conditions import Conditions, Spoken, TimedReference
from scripts.lost_speech import MarkedText, score, timed_pairs
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
        assert row["live"] == ({"chunk": 0, "left": 0} if "--live" in options else None)
        assert row["settings"] == [each for each in options if "=" in each]


def timed(*words: tuple[str, float]) -> list[TimedWord]:
    return [TimedWord(word, start, start + 0.3, 1.0) for word, start in words]


def test_lost_words_and_marks_are_counted() -> None:
    recording = spoken(8.0)

    def counts(
        words: list[TimedWord], *spans: tuple[float, float], kind: Any = "speech without text"
    ) -> tuple[int, int, int, int]:
        text = " ".join(word.word for word in words)
        return score(recording, MarkedText(text, words, [Mark(kind, *span) for span in spans]))

    all_words = timed(*(("one", n + 0.3) for n in range(8)))
    assert counts(all_words) == (0, 0, 0, 0)
    assert counts(all_words, (1.0, 1.5)) == (0, 0, 0, 1)
    assert counts([]) == (8, 1, 1, 0)
    assert counts([], (0.3, 7.7)) == (8, 1, 0, 0)
    assert counts(timed(("two", 0.3)), (20.0, 21.0)) == (8, 1, 1, 1)
    # Words of other times are not those that were lost.
    kept = [*all_words[:2], *all_words[5:]]
    assert counts(kept, (2.5, 4.5)) == (3, 1, 0, 0)
    assert counts(kept, (5.5, 7.0)) == (3, 1, 1, 1)
    # Text unlike the speech may be of any wrong word.
    wrong = [*all_words[:3], *timed(("two", 3.3)), *all_words[4:]]
    assert counts(wrong, (3.3, 3.6), kind="text unlike the speech") == (1, 0, 0, 0)
    assert counts(wrong, (3.3, 3.6)) == (1, 0, 0, 1)
    assert counts(wrong, (6.3, 6.6), kind="text unlike the speech") == (1, 0, 0, 1)


def test_times_decide_between_alignments() -> None:
    reference = spoken(6.0).words
    for kept in ([0, 1, 5], [0, 4, 5], [2, 3], []):
        hypothesis = timed(*(("one", kept_second + 0.25) for kept_second in kept))
        pairs = timed_pairs(reference, hypothesis)
        assert [reference.index(one) for one, other in pairs if one and other] == kept
        assert [other for _, other in pairs if other] == hypothesis
        assert [one for one, _ in pairs if one] == list(reference)


def test_conditions_keep_words_and_speakers() -> None:
    utterances = [replace(spoken(1.0 + n % 3), speaker=f"{n % 2}") for n in range(8)]
    conditions = Conditions(utterances, seed=1)
    made = {name: make() for name, make in conditions.all((0.02,), (5,))}
    assert len(made) == 13
    for name, recordings in made.items():
        for recording in recordings:
            assert recording.words[-1].end <= recording.seconds, name
            assert all(word.start >= 0 for word in recording.words)
    assert sum(each.utterances for each in made["telephone band"]) == 8
    (turns,) = made["two speakers in turns, 10 s"]
    assert turns.utterances >= 5
    padded = made["0.02 s of zeros before"][0]
    assert padded.words[0].start == pytest.approx(0.22)
    changed, same = made["level changes of 30 dB"][0], conditions.long(20.0, (0.0, 0.0))[0]
    quiet = slice(3 * 16000, 6 * 16000)
    assert changed.samples_S[quiet] == pytest.approx(same.samples_S[quiet] * 10**-1.5, abs=1e-6)


def test_steps_of_padding_and_selected_conditions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny(tmp_path / "model", make_tokenizer())
    monkeypatch.setattr(lost_speech, "read_utterances", lambda *_: [spoken(0.5)])
    rows = tmp_path / "rows.jsonl"
    options = ["--padding-step", "0.5", "--only", "zeros before", "--rows", str(rows)]
    lost_speech.main([str(model), "--data", "data", *options])
    names = [json.loads(line)["condition"] for line in rows.read_text().splitlines()]
    assert names == [f"{seconds} s of zeros before" for seconds in ("0.5", "1", "1.5", "2")]
    for wrong, message in (
        (["--padding-step", "0"], "--padding-step is 0.0, needs more than 0"),
        (["--chunk", "8"], "--chunk and --left need --live"),
    ):
        with pytest.raises(SystemExit):
            lost_speech.main([str(model), "--data", "data", *wrong])
        assert message in capsys.readouterr().err
