"""Export a trained run: sherpa-onnx gives the texts of our own decoding."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import soundfile
import torch

import pruned_rnnt
from pruned_rnnt.cli import main
from pruned_rnnt.cli.command import EXIT_FAILED, EXIT_USAGE
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.decode.scoring.error_rates import ErrorCounts
from pruned_rnnt.export.graphs import Graph, decoder, joiner
from pruned_rnnt.export.onnx_folder import OnnxOptions, encoder_graph
from pruned_rnnt.export.verify import run_recognise, verify
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.quantise.measurements import FileErrors, file_errors
from pruned_rnnt.train.engine.run_files import read_p99_duration
from pruned_rnnt.train.run import LoadedModel, load_model, run_config
from pruned_rnnt.transcribe.recogniser import Recogniser
from scripts import export_speed
from tests.export.beam_texts import beam_texts, error_rate
from tests.export.tone_corpus import TONES, make_corpus, sing

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytest.importorskip("sherpa_onnx")

pytestmark = pytest.mark.slow  # trains a model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal model, trained until it makes few errors on its five words."""
    corpus = make_corpus(tmp_path_factory.mktemp("tones"))
    folder = tmp_path_factory.mktemp("exp") / "tones"
    settings = [
        f"data.path={corpus}",
        "data.num_workers=0",
        "data.max_duration=60",
        "data.num_buckets=2",
        "data.augmentation.spec_augment.enabled=false",
        f"train.folder={folder}",
        "train.device=cpu",
        "train.steps=260",
        "train.validate_every=1000",
        "train.save_every=1000",
        "train.average_decay=0.9",
        "optimiser.learning_rate=5e-3",
        "schedule.warm_up_steps=20",
        "loss.warm_up_steps=20",
        "model.encoder.layers=2",
        "model.encoder.dim=48",
        "model.encoder.heads=2",
        "model.encoder.feedforward_dim=96",
        "model.encoder.kernel_size=5",
        "model.encoder.subsampling_channels=8",
        "model.encoder.dropout=0",
        "model.encoder.feature_norm=fixed",
        "model.encoder.causal=true",
        "model.encoder.chunk_size=8",
        "model.encoder.left_chunks=3",
        "model.predictor.dim=32",
        "model.joiner_dim=48",
    ]
    assert main(["train", *settings]) == 0
    return folder


class Utterances(NamedTuple):
    """Audio files and their texts."""

    paths: list[Path]
    texts: list[str]


@pytest.fixture(scope="module")
def utterances(tmp_path_factory: pytest.TempPathFactory) -> Utterances:
    """120 utterances, about 300 words."""
    rng = np.random.default_rng(5)
    folder = tmp_path_factory.mktemp("audio")
    paths, texts = [], []
    for index in range(120):
        words = [str(word) for word in rng.choice(list(TONES), size=rng.integers(1, 5))]
        paths.append(folder / f"{index}.wav")
        soundfile.write(paths[-1], sing(words, rng), 16000)
        texts.append(" ".join(words))
    return Utterances(paths, texts)


@pytest.fixture(scope="module")
def offline(run: Path) -> Path:
    assert main(["export", str(run), "--int8", "--fp16"]) == 0
    return run / "export" / "onnx"


def graphs_of(loaded: LoadedModel) -> tuple[Graph, ...]:
    encoder = encoder_graph(loaded.model, OnnxOptions())
    return (encoder, decoder(loaded.model), joiner(loaded.model))


def test_sherpa_onnx_gives_our_texts(run: Path, offline: Path, utterances: Utterances) -> None:
    paths, texts = utterances
    loaded = load_model(run_config(run))
    found = verify(loaded.model, loaded.tokenizer, graphs_of(loaded), offline, paths)
    assert [result.precision for result in found] == ["fp32", "int8", "fp16"]
    assert found[0].exact, "\n".join(found[0].lines())
    rates = [error_rate(texts, [pair.exported for pair in result.texts]) for result in found]
    assert rates[0] < 0.2, "the model has not learnt enough for this test to mean anything"
    assert max(rates) - rates[0] <= 0.01
    assert not found[1].exact, "int8 outputs cannot equal those of float32"
    readme = (offline / "README.md").read_text()
    assert "may differ for\n  files with another sampling rate" in readme
    assert "python recognise.py" in readme
    assert "--precision int8" in readme
    assert "## Streaming" not in readme
    assert "loss.rnnt_type is regular" in readme


def test_modified_beam_search_nearly_matches_torch(
    run: Path, offline: Path, utterances: Utterances
) -> None:
    paths, texts = utterances
    theirs = [line["text"] for line in run_recognise(offline, paths, method="modified_beam_search")]
    ours = beam_texts(load_model(run_config(run)), paths)
    assert error_rate(texts, ours) < 0.2
    assert abs(error_rate(texts, ours) - error_rate(texts, theirs)) <= 0.005


def test_speed_is_measured(
    run: Path,
    offline: Path,
    utterances: Utterances,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    audio = [str(path) for path in utterances.paths[:3]]
    arguments = ["--audio", *audio, "--threads", "1", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["export_speed", str(run), *arguments])
    threads = torch.get_num_threads()
    export_speed.main()
    torch.set_num_threads(threads)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [(row["system"], row["precision"]) for row in rows if "chunks" not in row["decoding"]]
    assert [precision for _, precision in found] == ["fp32", "int8", "fp16", "fp32"]
    assert [system.split()[0] for system, _ in found] == ["sherpa-onnx"] * 3 + ["torch"]
    assert all(row["real_time_factor"] > 0 and row["files"] == 2 for row in rows)


def test_default_windows_are_as_long_as_training_utterances(
    run: Path, utterances: Utterances, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = []

    def spy(recogniser: Recogniser, *_: object) -> bool:
        windows.append(recogniser._segments.lengths(recogniser.p99_duration).longest)
        return True

    monkeypatch.setattr("pruned_rnnt.transcribe.transcribe_command.run_transcribe", spy)
    assert main(["transcribe", str(run), str(utterances.paths[0])]) == 0
    assert main(["transcribe", str(run), str(utterances.paths[0]), "--window", "9"]) == 0
    cuts = PreparedFolder(Path(run_config(run).data.path)).cuts("train")
    durations = sorted(cut.duration for cut in cuts)
    assert durations[-4] <= 0.01 * windows[0] / 1.25 + 0.01
    assert 0.01 * windows[0] / 1.25 - 0.01 <= durations[-1]
    assert windows[1] == 900


def test_sherpa_onnx_gives_our_streaming_texts(
    run: Path, utterances: Utterances, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths, texts = (values[:60] for values in utterances)
    arguments = ["export", str(run), "--streaming", "--output", str(tmp_path), "--verify"]
    assert main([*arguments, *map(str, paths)]) == 0
    shown = capsys.readouterr().out
    assert "may decode differently: loss.rnnt_type is regular" in shown
    assert f"sherpa-onnx fp32: {len(paths)} of {len(paths)} texts" in shown
    assert "\nverified\n" in shown
    # Training audio does not end in noise like that at the end of a stream, so that the model may
    # emit a word there.
    streamed = [line["text"] for line in run_recognise(tmp_path, paths)]
    starts = [words.startswith(text) for text, words in zip(texts, streamed, strict=True)]
    assert sum(starts) > len(starts) / 2
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert (settings["chunk_frames"], settings["left_frames"]) == (8, 24)
    assert "## Streaming" in (tmp_path / "README.md").read_text()


def test_verify_fails_for_another_model(run: Path, offline: Path, utterances: Utterances) -> None:
    loaded = load_model(run_config(run))
    with torch.no_grad():
        loaded.model.joiner.output_linear.bias[0] -= 0.01
    found = verify(loaded.model, loaded.tokenizer, graphs_of(loaded), offline, utterances.paths[:3])
    assert found[0].differences["joiner.onnx logit"] == pytest.approx(0.01, rel=0.01)
    assert not found[0].exact


def test_torch_file_round_trip(
    run: Path, utterances: Utterances, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = utterances.paths[:6]
    assert main(["export", str(run), "--format", "torch", "--output", str(tmp_path / "out")]) == 0
    recogniser = pruned_rnnt.load(tmp_path / "out")
    assert read_p99_duration(run) == recogniser.p99_duration
    assert 1.0 < recogniser.p99_duration < 3.0
    capsys.readouterr()
    assert main(["transcribe", str(run), *map(str, paths), "--times"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["transcribe", str(tmp_path / "out/model.pt"), *map(str, paths), "--times"]) == 0
    assert capsys.readouterr().out.splitlines() == lines
    for path in paths:
        result = recogniser.transcribe(path)
        assert f"{path}\t{result.text}" in lines
        assert [word.word for word in result.words] == result.text.split()
        seconds = soundfile.info(path).duration
        times = [time for word in result.words for time in (word.start, word.end)]
        assert all(0 <= time <= seconds + 0.05 for time in times)
        assert [word.start for word in result.words] == sorted(word.start for word in result.words)


def test_quantised_files_are_measured(
    run: Path,
    utterances: Utterances,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Error rates of exported files, and sherpa-onnx runs them."""
    # The model makes no errors in float32 and, on some processors, one in four bits.
    monkeypatch.setattr("pruned_rnnt.quantise.contract.file_errors", _with_four_more)
    data = run_config(run).data.path
    arguments = ["export", str(run), "--output", str(tmp_path), "--precision", "int8", "int4"]
    measured = ["--calibrate", f"{data}/train", "--measure", f"{data}/test"]
    assert main([*arguments, *measured, "--max-wer-increase", "50"]) == 0
    shown = capsys.readouterr().out
    results = json.loads((tmp_path / "settings.json").read_text())["quantisation"]
    assert list(results) == ["int8", "int4"]
    name = Path(data).name
    for precision, result in results.items():
        assert result["measured_on"] == f"{name} test"
        assert result["calibrated_on"] == f"{name} train"
        assert result["utterances"] == 16
        assert result["errors"] <= 1.5 * result["fp32_errors"]
        assert result["lower"] <= result["difference"] <= result["upper"]
        assert f"{precision}: {result['fp32_bytes'] / result['bytes']:.2f} times smaller" in shown
        lines = run_recognise(tmp_path, utterances.paths, precision)
        assert error_rate(utterances.texts, [line["text"] for line in lines]) < 0.25
    readme = (tmp_path / "README.md").read_text()
    assert "## Quantised files" in readme
    assert "was not measured" not in readme
    assert "--precision int4" in readme


def test_without_data_nothing_is_measured(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a refused export leaves the earlier files."""
    arguments = ["export", str(run), "--output", str(tmp_path / "out"), "--precision", "int4"]
    assert main(arguments) == 0
    assert "int4: nothing was measured" in capsys.readouterr().out
    assert "The error rate of int4 was not measured" in (tmp_path / "out/README.md").read_text()
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    data = run_config(run).data.path
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pruned_rnnt.quantise.contract.file_errors", _worse_if_quantised)
        assert main([*arguments, "--calibrate", f"{data}/train"]) == EXIT_FAILED
    assert "raises the error rate on" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _with_four_more(*arguments: Any) -> FileErrors:
    found = file_errors(*arguments)
    counts = found.counts + ErrorCounts(deletions=4)
    return found._replace(counts=counts, errors=(found.errors[0] + 4, *found.errors[1:]))


def _worse_if_quantised(_: Path, precision: str, measured: object) -> FileErrors:
    errors = 10 if precision == "fp32" else 20
    return FileErrors(ErrorCounts(deletions=errors, reference_words=100), (errors,), (100,))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["export", "/nowhere"], EXIT_USAGE, "/nowhere is not a run"),
        (["export", "RUN", "--chunk", "4"], EXIT_FAILED, "--chunk and --left need --streaming"),
        (["export", "RUN", "--streaming", "--chunk", "-4"], EXIT_FAILED, "--chunk is -4"),
        (["export", "RUN", "--format", "torch", "--int8"], EXIT_USAGE, "need --format onnx"),
        (["export", "RUN", "--calibrate", "d/train"], EXIT_USAGE, "needs --precision int8 or int4"),
        (["export", "RUN", "--int8", "--measure", "d/dev"], EXIT_USAGE, "need --calibrate"),
        (["export", "RUN", "--int8", "--calibrate", "d/train"], EXIT_USAGE, "no split 'train'"),
        (["export", "RUN", "--verify", "absent.wav"], EXIT_USAGE, "not found: absent.wav"),
        (["export", "RUN", "decode.checkpoint=absent.pt"], EXIT_FAILED, "not found: absent.pt"),
        (["export", "RUN", "decode.checkpoint=RUN/config.yaml"], EXIT_FAILED, "not a checkpoint"),
        (["transcribe", "/nowhere", "a.wav"], EXIT_USAGE, "nor an exported model at /nowhere"),
        (["transcribe", "RUN", "absent.wav"], EXIT_FAILED, "not found: absent.wav"),
        (["transcribe", "RUN", "RUN/config.yaml"], EXIT_FAILED, "cannot be read as audio"),
        (["transcribe", "RUN/config.yaml", "a.wav"], EXIT_USAGE, "not a model file"),
    ],
)
def test_errors_are_one_line(
    run: Path,
    arguments: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([argument.replace("RUN", str(run)) for argument in arguments]) == code
    shown = capsys.readouterr().err.strip()
    assert message in shown
    assert len(shown.splitlines()) == 1


def test_unusable_checkpoints_are_errors(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.pt"
    newest = sorted((run / "checkpoints").glob("step-*.pt"))[-1]
    values = torch.load(newest, weights_only=False)

    def error_for(changed: object) -> str:
        torch.save(changed, path)
        assert main(["export", str(run), f"decode.checkpoint={path}"]) != 0
        return capsys.readouterr().err.strip()

    changed_model = copy.deepcopy(values["config"])
    changed_model["model"]["joiner_dim"] += 8
    unknown_model = copy.deepcopy(values["config"])
    unknown_model["model"]["encoder"]["kind"] = "perceptron"
    larger = TransducerModel(load_model(run_config(run)).model.config, values["vocab_size"] + 1)
    for changed, message in (
        ({"model": values["model"], "optimizer": {}}, "is not a pruned_rnnt checkpoint"),
        ({**values, "config": changed_model}, "does not fit its own configuration"),
        ({**values, "config": unknown_model}, "perceptron"),
        (
            {
                **values,
                "vocab_size": values["vocab_size"] + 1,
                "model": larger.state_dict(),
                "average": None,
            },
            "they do not come from the same run",
        ),
    ):
        shown = error_for(changed)
        assert message in shown
        assert str(path) in shown or "same run" in shown
        assert len(shown.splitlines()) == 1


@pytest.mark.parametrize(
    ("missing", "options"), [("onnxscript", []), ("sherpa_onnx", ["--verify", __file__])]
)
def test_missing_package_is_named(
    missing: str,
    options: list[str],
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["export", str(run), *options]) == EXIT_FAILED
    shown = capsys.readouterr().err.strip()
    assert shown.endswith(
        f"{missing.replace('_', '-')} is not installed: pip install 'pruned_rnnt[export]'"
    )
    assert len(shown.splitlines()) == 1
