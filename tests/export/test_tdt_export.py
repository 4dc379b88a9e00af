"""Exported TDT models: the files in sherpa-onnx against our greedy search."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import soundfile
import torch

import pruned_rnnt
from pruned_rnnt.data.audio.features import audio_features
from pruned_rnnt.data.tokens.tokenizer import UNKNOWN_ID, Tokenizer
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.decode.build_search import new_greedy_search
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.export.differences import differences
from pruned_rnnt.export.graphs import Graph
from pruned_rnnt.export.model_file import ModelFile
from pruned_rnnt.export.nemo_graphs import tdt_tokens
from pruned_rnnt.export.onnx_folder import OnnxOptions, export_onnx
from pruned_rnnt.export.readme import use_of_export
from pruned_rnnt.export.tdt_features import KaldiFeatures, sherpa_features
from pruned_rnnt.export.verify import converted_features, run_recognise, verify
from pruned_rnnt.model.predictor import PredictorConfig
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.pretrained.onnx_recogniser import OnnxRecogniser
from pruned_rnnt.system.usage_errors import ExportError
from tests.tiny_models import tiny_conformer, tiny_model

WORDS = [a + b for a, b in itertools.product("abcdef", "uvwxyz")]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([" ".join(WORDS)], TokenizerConfig(kind="word", vocab_size=50))


def make_model(
    tokenizer: Tokenizer, context_size: int, durations: tuple[int, ...]
) -> TransducerModel:
    """It emits often, and `<unk>` is often the most probable symbol."""
    predictor = PredictorConfig(dim=8, context_size=context_size)
    size = len(tokenizer)
    model = tiny_model(tiny_conformer(), size, predictor=predictor, durations=durations, seed=2)
    with torch.no_grad():
        model.joiner.output_linear.bias[:3] += torch.tensor([6.0, -9.0, 5.0])
    return model


@pytest.fixture(scope="module")
def audio(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, rng = tmp_path_factory.mktemp("audio"), np.random.default_rng(1)
    paths = []
    for index, seconds in enumerate((2.5, 0.9, 0.05)):
        count = int(seconds * 16000)
        pitch = rng.uniform(100, 3000, size=1 + count // 4000).repeat(4000)[:count]
        tones = 0.1 * np.sin(np.cumsum(2 * np.pi * pitch / 16000))
        paths.append(folder / f"{index}.wav")
        soundfile.write(paths[-1], tones + 0.01 * rng.standard_normal(count), 16000)
    # Pauses of zeros, whose features are those of the floor.
    seconds_S = np.arange(24000) / 16000
    tones = 0.3 * np.sin(2 * np.pi * (150 + 900 * seconds_S) * seconds_S)
    paths.append(folder / "pauses.wav")
    soundfile.write(paths[-1], tones * (np.sin(6 * np.pi * seconds_S) > -0.5), 16000)
    return paths


class Exported(NamedTuple):
    """A model in a folder of ONNX files; durations: those of its frames."""

    model: TransducerModel
    durations: tuple[int, ...]
    graphs: Sequence[Graph]
    folder: Path


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, (0, 1, 2, 3, 4)), id="two", marks=pytest.mark.slow),
        pytest.param((1, (2, 0, 1, 5)), id="one"),
    ],
)
def exported(
    request: pytest.FixtureRequest, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Exported:
    """By context size of the predictor."""
    context_size, durations = request.param
    model = make_model(tokenizer, context_size, durations)
    folder = tmp_path_factory.mktemp("tdt")
    graphs = export_onnx(ModelFile(model, tokenizer), folder, OnnxOptions(int8=True), "tests")
    return Exported(model, durations, graphs, folder)


@pytest.mark.slow
def test_sherpa_onnx_finds_our_texts(
    exported: Exported, tokenizer: Tokenizer, audio: list[Path]
) -> None:
    model, durations, graphs, folder = exported
    plain, small = verify(model, tokenizer, graphs, folder, audio)
    assert plain.exact, "\n".join(plain.lines())
    lengths = [len(pair.ours.split()) for pair in plain.texts]
    assert lengths[0] > 5, "the model emits too little for this test to mean anything"
    assert len({word for pair in plain.texts for word in pair.ours.split()}) > 3
    assert "texts equal those of our greedy search on the features" in "\n".join(plain.lines())
    assert max(small.differences.values()) > max(plain.differences.values())
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    assert (settings["kind"], settings["longest_duration"]) == ("tdt", max(durations))
    readme = use_of_export(folder, "onnx")
    assert f"a duration of up to {max(durations)} frames" in readme
    assert "--model-type=nemo_transducer" in readme
    beam = run_recognise(folder, audio[:1], method="modified_beam_search")
    assert beam[0]["text"]


@pytest.mark.slow
def test_onnxruntime_finds_the_path_of_our_search(
    exported: Exported, tokenizer: Tokenizer, audio: list[Path]
) -> None:
    """On the converted features of sherpa-onnx; `pruned_rnnt.load` opens such a folder."""
    model, _, (encoder, *_), folder = exported
    recogniser = pruned_rnnt.load(folder)
    lengths = []
    for path in audio[:2]:
        samples_S = soundfile.read(path, dtype="float32")[0]
        features_TF = converted_features(encoder, sherpa_features(samples_S))
        encoded_NTE, frames = model.encode(features_TF[None], torch.tensor([len(features_TF)]))
        expected = new_greedy_search(model, [UNKNOWN_ID], 0)(encoded_NTE, frames)[0]
        assert isinstance(recogniser, OnnxRecogniser)
        found = recogniser._best_nemo_path(samples_S)
        for name in ("symbols", "frames", "durations"):
            assert getattr(found, name) == getattr(expected, name), name
        # Not equal: the file's logits leave out `<unk>`.
        assert all(score < 0 for score in found.symbol_scores)
        lengths.append(len(found.symbols))
        assert recogniser.transcribe(samples_S).text == tokenizer.decode(expected.symbols)
    assert min(lengths) > 3
    assert recogniser.transcribe(audio[2]).text == ""
    assert "pruned_rnnt.load" in use_of_export(folder, "onnx")


def test_tokens_end_with_the_blank(tokenizer: Tokenizer) -> None:
    lines = tdt_tokens(tokenizer.symbols).splitlines()
    assert lines[-1] == f"<blk> {len(tokenizer) - 1}"
    assert lines[0].split() == [tokenizer.symbols[1], "0"]


def test_what_cannot_run_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make_model(tokenizer, 2, (0, 1))
    with pytest.raises(ExportError, match="sherpa-onnx cannot stream TDT models"):
        export_onnx(ModelFile(model, tokenizer), tmp_path, OnnxOptions(streaming=True), "tests")
    with pytest.raises(ExportError, match="--fp16 does not work"):
        export_onnx(ModelFile(model, tokenizer), tmp_path, OnnxOptions(fp16=True), "tests")


def test_differences_are_listed(tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer, 2, (0, 1))
    assert len(list(differences(model, DecodeConfig()))) == 1
    decode = DecodeConfig(method="modified_beam", max_symbols_per_frame=2, skip_unknown=False)
    assert len(list(differences(model, decode))) == 4


def test_converted_features_are_near_those_of_training(audio: list[Path]) -> None:
    """Where there is sound: the floor of sherpa-onnx's features hides quiet parts."""
    samples_S = soundfile.read(audio[0], dtype="float32")[0]
    ours_TF = audio_features(samples_S)
    converted_TF = KaldiFeatures()(sherpa_features(samples_S).T[None])[0]
    assert converted_TF.shape == ours_TF.shape
    loud = ours_TF > ours_TF.mean()
    assert (converted_TF - ours_TF)[loud].abs().median() < 0.15
    unconverted = sherpa_features(samples_S)
    assert (unconverted - ours_TF)[loud].abs().median() > 1.0


def test_silence_stays_silence() -> None:
    floor = np.log(np.finfo(np.float32).eps)
    features = KaldiFeatures()(torch.full((1, 80, 5), float(floor)))
    torch.testing.assert_close(features, torch.full((1, 5, 80), float(floor)))
