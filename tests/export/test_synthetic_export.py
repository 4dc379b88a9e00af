"""A model of the synthetic recipe, exported to sherpa-onnx.

The model is a causal Conformer of 0.6 M parameters after a minute of training on 1,100 of the
recipe's commands; the test set has other voices than the training set.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from lhotse import CutSet

from pruned_rnnt.cli import main
from pruned_rnnt.export.graphs import decoder, joiner
from pruned_rnnt.export.onnx_folder import OnnxOptions, encoder_graph
from pruned_rnnt.export.verify import run_recognise, verify
from pruned_rnnt.train.run import LoadedModel, load_model, run_config
from scripts import export_speed
from tests.export.beam_texts import beam_texts, error_rate

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytest.importorskip("sherpa_onnx")
pytest.importorskip("espeakng_loader")

pytestmark = pytest.mark.slow  # trains a model

_CONFIG = Path(__file__).parents[2] / "configs" / "synthetic.yaml"
_SETTINGS = [
    "data.augmentation.spec_augment.enabled=false",
    "train.device=cpu",
    "data.max_duration=30",
    "train.steps=620",
    "train.validate_every=1000",
    "train.save_every=1000",
    "train.average_decay=0.98",
    "schedule.warm_up_steps=40",
    "loss.kind=full",
    "model.encoder.feature_norm=fixed",
    "model.encoder.causal=true",
    "model.encoder.chunk_size=16",
    "model.encoder.left_chunks=4",
    "model.encoder.layers=3",
    "model.encoder.dim=96",
    "model.encoder.feedforward_dim=256",
    "model.encoder.kernel_size=9",
    "model.encoder.subsampling_channels=8",
    "model.predictor.dim=64",
    "model.joiner_dim=96",
]


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic") / "data"
    sizes = ["--train", "1100", "--dev", "10", "--test", "120", "--num-jobs", "1"]
    assert main(["prepare", "synthetic", "--output", str(folder), *sizes]) == 0
    return folder


@pytest.fixture(scope="module")
def run(spoken: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exp") / "commands"
    places = [f"data.path={spoken}", f"train.folder={folder}"]
    assert main(["train", "--config", str(_CONFIG), *places, *_SETTINGS]) == 0
    return folder


@pytest.fixture(scope="module")
def loaded(run: Path) -> LoadedModel:
    return load_model(run_config(run))


@pytest.fixture(scope="module")
def test_set(spoken: Path) -> tuple[list[Path], list[str]]:
    """All test utterances and their texts."""
    cuts = list(CutSet.from_file(spoken / "test_cuts.jsonl.gz"))
    paths = [spoken / cut.recording.sources[0].source for cut in cuts]
    return paths, [cut.supervisions[0].text for cut in cuts]


@pytest.fixture(scope="module")
def offline(run: Path) -> Path:
    assert main(["export", str(run), "--int8"]) == 0
    return run / "export" / "onnx"


def test_offline_greedy_search_matches_torch(
    loaded: LoadedModel, offline: Path, test_set: tuple[list[Path], list[str]]
) -> None:
    paths, texts = test_set
    model = loaded.model
    graphs = (encoder_graph(model, OnnxOptions()), decoder(model), joiner(model))
    exact, int8 = verify(model, loaded.tokenizer, graphs, offline, paths)
    assert exact.exact, "\n".join(exact.lines())
    rate = error_rate(texts, [pair.exported for pair in exact.texts])
    assert rate < 0.3, "the model has not learnt enough for this test to mean anything"
    assert all(pair.ours for pair in exact.texts)
    assert int8.precision == "int8"
    assert abs(error_rate(texts, [pair.exported for pair in int8.texts]) - rate) <= 0.01


def test_modified_beam_search_nearly_matches_torch(
    loaded: LoadedModel, offline: Path, test_set: tuple[list[Path], list[str]]
) -> None:
    paths, texts = test_set
    theirs = [line["text"] for line in run_recognise(offline, paths, method="modified_beam_search")]
    ours = beam_texts(loaded, paths)
    assert abs(error_rate(texts, ours) - error_rate(texts, theirs)) <= 0.005


def test_streaming_greedy_search_matches_torch(
    loaded: LoadedModel, run: Path, test_set: tuple[list[Path], list[str]]
) -> None:
    paths, texts = (values[:60] for values in test_set)
    assert main(["export", str(run), "--streaming"]) == 0
    model = loaded.model
    encoder = encoder_graph(model, OnnxOptions(streaming=True))
    (found,) = verify(
        model,
        loaded.tokenizer,
        (encoder, decoder(model), joiner(model)),
        run / "export" / "onnx-streaming",
        paths,
    )
    assert found.exact, "\n".join(found.lines())
    assert error_rate(texts, [pair.exported for pair in found.texts]) < 0.3


def test_speed_is_measured(
    run: Path,
    offline: Path,
    test_set: tuple[list[Path], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    audio = [str(path) for path in test_set[0][:3]]
    arguments = ["--audio", *audio, "--threads", "1", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["export_speed", str(run), *arguments])
    threads = torch.get_num_threads()
    export_speed.main()
    torch.set_num_threads(threads)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [(row["system"], row["precision"]) for row in rows if "chunks" not in row["decoding"]]
    assert [precision for _, precision in found] == ["fp32", "int8", "fp32"]
    assert [system.split()[0] for system, _ in found] == ["sherpa-onnx", "sherpa-onnx", "torch"]
    assert all(row["real_time_factor"] > 0 and row["files"] == 2 for row in rows)
