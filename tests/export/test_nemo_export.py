"""Models of NeMo in sherpa-onnx: the same texts as our greedy search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import soundfile
import torch

import pruned_rnnt
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.export.differences import differences
from pruned_rnnt.export.model_file import ModelFile
from pruned_rnnt.export.onnx_folder import OnnxOptions, export_onnx
from pruned_rnnt.export.readme import use_of_export
from pruned_rnnt.export.tdt_graphs import LstmDecoderGraph
from pruned_rnnt.export.verify import verify
from pruned_rnnt.interop.nemo.imported_model import ImportedModel, import_model
from pruned_rnnt.model.fastconformer import FastConformerConfig
from pruned_rnnt.system.usage_errors import ExportError
from tests.interop.parakeet_corpus import wave
from tests.interop.test_parakeet import written
from tests.tiny_models import tiny_fastconformer, tiny_model


def imported(name: str, folder: Path) -> ImportedModel:
    """A model that emits several symbols in its frames, not always the most that is allowed."""
    found = import_model(written(name, folder))
    with torch.no_grad():
        found.model.joiner.output_linear.bias[0] += 1.0  # type: ignore[union-attr, operator]
    return found


@pytest.fixture(scope="module")
def audio(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("audio")
    paths = []
    for index, text in enumerate(("one two three", "zero", "two two one zero three")):
        paths.append(folder / f"{index}.wav")
        soundfile.write(paths[-1], wave(text, index), 16000)
    return paths


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nemo_rnnt", "nemo_tdt", "transformers_tdt"])
def test_sherpa_onnx_finds_our_texts(name: str, audio: list[Path], tmp_path: Path) -> None:
    model = imported(name, tmp_path)
    folder = tmp_path / "onnx"
    parts = ModelFile(model.model, model.tokenizer)
    graphs = export_onnx(parts, folder, OnnxOptions(int8=True), "tests")
    plain, small = verify(model.model, model.tokenizer, graphs, folder, audio)
    assert plain.exact, "\n".join(plain.lines())
    assert plain.own_features is not None
    assert len({pair.ours for pair in plain.texts}) == len(audio)
    assert max(small.differences.values()) > max(plain.differences.values())
    properties = onnx.load(folder / "encoder.onnx", load_external_data=False).metadata_props
    metadata = {each.key: each.value for each in properties}
    expected: dict[str, Any] = {
        "model_type": "EncDecRNNTBPEModel",
        "normalize_type": "per_feature",
        "subsampling_factor": 8,
        "pred_rnn_layers": 2,
        "vocab_size": model.model.vocab_size - 1,
        "feat_dim": 80,
        "url": "tdt" if name.endswith("tdt") else "",
    }
    assert {key: metadata[key] for key in expected} == {k: str(v) for k, v in expected.items()}
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    assert settings["kind"] == ("tdt" if name.endswith("tdt") else "nemo")
    readme = use_of_export(folder, "onnx")
    assert "--model-type=nemo_transducer" in readme
    assert "frames of 80 ms" in readme
    assert ("skips frames" in readme) == name.endswith("tdt")
    with pytest.raises(ExportError, match="which only sherpa-onnx runs"):
        pruned_rnnt.load(folder)


@pytest.mark.parametrize("name", ["nemo_rnnt", "nemo_tdt"])
def test_the_decoder_has_the_outputs_of_the_predictor(name: str, tmp_path: Path) -> None:
    model = imported(name, tmp_path).model
    graph = LstmDecoderGraph(model)  # type: ignore[arg-type]
    targets = torch.tensor([[5, 3, 7]])
    with torch.no_grad():
        predicted = model.predictor.forward_targets(targets)  # type: ignore[union-attr, operator]
        expected = model.joiner.decoder_proj(predicted)[0]  # type: ignore[union-attr, operator]
        states = [torch.zeros(2, 1, 24)] * 2
        blank = model.vocab_size - 1
        for step, symbol in enumerate([blank, *(int(each) - 1 for each in targets[0])]):
            given = torch.tensor([[symbol]], dtype=torch.int32)
            output, _, *states = graph(given, torch.ones(1, dtype=torch.int32), *states)
            torch.testing.assert_close(output[0, :, 0], expected[step])


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    found = imported("nemo_rnnt", tmp_path)
    parts = ModelFile(found.model, found.tokenizer)
    for options, message in (
        (OnnxOptions(streaming=True), "--streaming does not work for a model of model.encoder"),
        (OnnxOptions(fp16=True), "--fp16 does not work for a model of model.encoder.features"),
    ):
        with pytest.raises(ExportError, match=message):
            export_onnx(parts, tmp_path / "onnx", options, "tests")
    folder = tmp_path / "ctc"
    folder.mkdir()
    ctc = import_model(written("nemo_ctc", folder))
    with pytest.raises(ExportError, match=r"kind is fastconformer, .* with a CTC model"):
        export_onnx(ModelFile(ctc.model, ctc.tokenizer), folder, OnnxOptions(), "tests")
    config: FastConformerConfig = tiny_fastconformer(features="fbank", num_mel_bins=80)
    own = tiny_model(config, len(found.tokenizer))
    with pytest.raises(ExportError, match=r"fastconformer, .* with model\.encoder\.features=fbank"):
        export_onnx(ModelFile(own, found.tokenizer), tmp_path / "own", OnnxOptions(), "tests")


def test_differences_are_listed(tmp_path: Path) -> None:
    folders = tmp_path / "rnnt", tmp_path / "tdt"
    for folder in folders:
        folder.mkdir()
    rnnt = imported("nemo_rnnt", folders[0]).model
    tdt = imported("nemo_tdt", folders[1]).model
    ten = DecodeConfig(max_symbols_per_frame=10)
    assert len(list(differences(rnnt, ten))) == 1
    assert len(list(differences(rnnt, DecodeConfig()))) == 2
    assert len(list(differences(tdt, DecodeConfig()))) == 1
    assert "at most 5 symbols" in list(differences(tdt, ten))[1]
