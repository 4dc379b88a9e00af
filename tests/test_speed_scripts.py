"""The scripts that measure decoding, transcription, live streams and cold starts: their rows are
complete.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from pruned_rnnt.cli import main
from pruned_rnnt.data.input.batch import AlignedWord
from pruned_rnnt.data.tokens.tokenizer import UNKNOWN_ID
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.decode.search.greedy import greedy_search
from pruned_rnnt.train.run import load_model, run_config
from pruned_rnnt.transcribe.endpoints import EndpointConfig, Reason
from pruned_rnnt.transcribe.recogniser import Recogniser
from pruned_rnnt.transcribe.stream import FinalText
from scripts import decoding_speed, greedy_steps, stream_speed, transcribe_speed
from scripts.cold_start.__main__ import main as cold_start
from scripts.stream_endpoints import Found, Joined, Utterance, decode, join, measure
from tests.decode.search_model import make_model
from tests.tiny_corpus import tiny_overrides
from tests.tiny_models import tiny_conformer, tiny_model
from tests.transcribe.random_model import save_random_model, sound


def utterance(*words: str) -> Utterance:
    """One second of sound for each word, which lasts from 0.2 to 0.8 s of it."""
    times = [AlignedWord(word=word, start=n + 0.2, duration=0.6) for n, word in enumerate(words)]
    return Utterance(sound(float(len(words))), times)


def found(text: str, end: float, reason: Reason = "pause") -> Found:
    return Found(FinalText(text=text, words=(), start=0.0, end=end, reason=reason), end + 0.1)


def joined() -> Joined:
    """Words that end at 1.8, 5.8 and 8.8 s."""
    return join([utterance("one", "two"), utterance("three", "four"), utterance("five")], (2, 2), 0)


def test_utterances_are_joined_with_pauses() -> None:
    stream = joined()
    assert len(stream.samples_S) == 16000 * (2 + 2 + 2 + 2 + 1 + 2)
    assert stream.ends == pytest.approx([1.8, 5.8, 8.8])
    assert [word.start for word in stream.utterances[1]] == pytest.approx([4.2, 5.2])


def test_endpoints_of_known_texts() -> None:
    # The first pause has its endpoint, the second one has it only after the first word of the next
    # utterance, and one utterance is in two texts.
    own = [
        found("one two", 2.5),
        found("three", 5.4),
        found("four five", 9.5),
        found("", 10.0, "end"),
    ]
    measured = measure([joined()], [own], 0.5)
    assert measured.errors.errors == 0
    assert (measured.pauses, measured.found) == (2, 1)
    assert measured.latencies == pytest.approx([2.6 - 1.8])
    assert (measured.utterances, measured.cut) == (3, 1)
    assert str(measured) == (
        "WER 0.00%, latency p50 800, p90 800, p99 800 ms, 1 of 2 pauses found, "
        "1 of 3 utterances cut"
    )


def test_scripts_run() -> None:
    tokenizer = train_tokenizer(["one two three", "four five"], TokenizerConfig(kind="char"))
    recogniser = Recogniser(tiny_model(tiny_conformer(causal=True), len(tokenizer)), tokenizer)
    finals = decode(recogniser, [joined(), joined()], EndpointConfig(pause=0.2))
    assert len(finals) == 2
    assert finals[0][-1].final.reason == "end"
    assert finals[0] == finals[1]
    speed = stream_speed.measure(recogniser, 3, seconds=0.5, packet=0.1)
    assert len(speed.steps) == 5
    assert speed.seconds == pytest.approx(0.5)
    assert np.isfinite(speed.factor)


def test_decoding_speed_rows(
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


@pytest.mark.slow
def test_greedy_steps_rows(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_rows_of_whole_processes(tmp_path: Path) -> None:
    rows = cold_start(["help", "--folder", str(tmp_path), "--json", str(tmp_path / "rows.jsonl")])
    assert [(row["process"], row["run"]) for row in rows] == [
        ("help", "first"),
        ("help", "second"),
        ("import numpy", "first"),
        ("import numpy", "second"),
    ]
    assert all(row["wall_s"] > 0 and "failed" not in row for row in rows)
    saved = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in saved] == rows


@pytest.mark.slow
def test_a_failed_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRUNED_RNNT_BACKEND", "none")  # raises at the first use of a loss
    (tmp_path / "one").mkdir()
    rows = cold_start(["transcribe", "--folder", str(tmp_path), "--audio", "one"])
    assert [row["failed"] != 0 for row in rows] == [True, True]


def test_training_without_shapes_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cold_start(["train", "--folder", str(tmp_path)])
    assert "needs --shapes" in capsys.readouterr().err


@pytest.mark.slow
def test_first_steps_of_a_training(tmp_path: Path) -> None:
    shapes = tmp_path / "shapes.npz"
    frames = np.random.default_rng(0).integers(10, 20, 300)
    np.savez(shapes, frames=frames, tokens=frames // 5)
    width = ["model.encoder.dim=16", "model.encoder.feedforward_dim=16"]
    settings = ["train.precision=float32", "model.encoder.layers=1", *width]
    sizes = ["--steps", "2", "--seconds", "2", "--models", "conformer"]
    files = ["--folder", str(tmp_path), "--shapes", str(shapes)]
    rows = cold_start(["train", *files, *sizes, "--overrides", *settings])
    for row in rows:
        assert 0 < row["ready_s"] < row["step_1_s"] < row["step_2_s"] <= row["wall_s"]
