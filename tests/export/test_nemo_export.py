"""Models of NeMo in sherpa-onnx: the same texts as our greedy search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt.data.audio.audio_file import read_audio
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.export.differences import differences
from pruned_rnnt.export.model_file import ModelFile
from pruned_rnnt.export.nemo_graphs import LstmDecoderGraph
from pruned_rnnt.export.onnx_folder import OnnxOptions, export_onnx
from pruned_rnnt.export.readme import use_of_export
from pruned_rnnt.export.tdt_features import has_floor, sherpa_features
from pruned_rnnt.export.verify import verify
from pruned_rnnt.interop.nemo.imported_model import import_model
from pruned_rnnt.model.fastconformer import FastConformerConfig
from pruned_rnnt.model.model_config import LossConfig, ModelConfig
from pruned_rnnt.model.predictor import LstmPredictorConfig
from pruned_rnnt.model.speech_model import CtcModel, TransducerModel
from pruned_rnnt.system.usage_errors import ExportError
from tests.export.test_tdt_export import WORDS, audio  # noqa: F401
from tests.interop.test_parakeet import written
from tests.tiny_models import tiny_fastconformer, tiny_model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([" ".join(WORDS)], TokenizerConfig(kind="word", vocab_size=50))


def nemo_features(audio: list[Path], *, as_nemo: bool = False) -> list[Tensor]:  # noqa: F811
    """(T, F) of each file, as the installed sherpa-onnx computes them."""
    floor = has_floor(is_normalised=True)
    return [sherpa_features(read_audio(path), as_nemo=as_nemo, has_floor=floor) for path in audio]


def make_model(
    tokenizer: Tokenizer,
    durations: tuple[int, ...],
    features: list[Tensor],
    **encoder_settings: Any,
) -> TransducerModel:
    """It emits different symbols, or none, in the frames of these features (T, F)."""
    encoder = tiny_fastconformer(num_mel_bins=80, **encoder_settings)
    predictor = LstmPredictorConfig(dim=8, layers=2)
    size = len(tokenizer)
    model = tiny_model(encoder, size, predictor=predictor, durations=durations, seed=2)
    with torch.no_grad():
        model.joiner.output_linear.bias[:3] += torch.tensor([4.0, -9.0, 5.0])
        # The encoder's random outputs hardly differ from frame to frame: use their differences.
        outputs = [model.encode(x_TF[None], torch.tensor([len(x_TF)]))[0][0] for x_TF in features]
        encoded_TE = torch.cat(outputs)
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(16, 16, generator=generator) / 8 / encoded_TE.std(0)
        model.joiner.encoder_proj.weight.copy_(weight)
        model.joiner.encoder_proj.bias.copy_(-weight @ encoded_TE.mean(0))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("durations", [(), (0, 1, 2, 3, 4)], ids=["rnnt", "tdt"])
def test_sherpa_onnx_finds_our_texts(
    durations: tuple[int, ...],
    tokenizer: Tokenizer,
    audio: list[Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    features = nemo_features(audio[:2])
    model = make_model(tokenizer, durations, features)
    folder = tmp_path / "onnx"
    graphs = export_onnx(ModelFile(model, tokenizer), folder, OnnxOptions(), "tests")
    (plain,) = verify(model, tokenizer, graphs, folder, audio)
    assert plain.exact, "\n".join(plain.lines())
    assert plain.own_features is not None
    lengths = [len(pair.ours.split()) for pair in plain.texts]
    assert lengths[0] > 5, "the model emits too little for this test to mean anything"
    assert len({word for pair in plain.texts for word in pair.ours.split()}) > 1
    properties = onnx.load(folder / "encoder.onnx", load_external_data=False).metadata_props
    metadata = {each.key: each.value for each in properties}
    expected: dict[str, Any] = {
        "model_type": "EncDecRNNTBPEModel",
        "normalize_type": "per_feature",
        "subsampling_factor": 8,
        "pred_rnn_layers": 2,
        "vocab_size": model.vocab_size - 1,
        "feat_dim": 80,
        "url": "tdt" if durations else "",
    }
    assert {key: metadata[key] for key in expected} == {k: str(v) for k, v in expected.items()}
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    assert settings["kind"] == ("tdt" if durations else "nemo")
    readme = use_of_export(folder, "onnx")
    assert "--model-type=nemo_transducer" in readme
    assert "frames of 80 ms" in readme
    assert ("skips frames" in readme) == bool(durations)
    recogniser = pruned_rnnt.load(folder)
    texts = [" ".join(recogniser.transcribe(path).text.split()) for path in audio[:2]]
    assert texts == [pair.ours for pair in plain.texts[:2]]


def make_ctc_model(
    tokenizer: Tokenizer, features: list[Tensor], seed: int, **encoder_settings: Any
) -> CtcModel:
    """Its symbols change from frame to frame of these features (T, F)."""
    torch.manual_seed(seed)
    config = ModelConfig(encoder=tiny_fastconformer(num_mel_bins=80, **encoder_settings))
    model = CtcModel(config, len(tokenizer), LossConfig(kind="ctc")).eval()
    assert model.ctc_head is not None
    with torch.no_grad():
        outputs = [model.encode(x_TF[None], torch.tensor([len(x_TF)]))[0][0] for x_TF in features]
        encoded_TE = torch.cat(outputs)
        model.ctc_head.weight.mul_(8 / encoded_TE.std(0))
        model.ctc_head.bias.copy_(-model.ctc_head.weight @ encoded_TE.mean(0))
        # <unk> has no text of its own here.
        model.ctc_head.bias[2] -= 1e3
    return model


@pytest.mark.slow
def test_sherpa_onnx_finds_our_texts_of_a_ctc_model(
    tokenizer: Tokenizer,
    audio: list[Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    features = nemo_features(audio[:2], as_nemo=True)
    # In each frame the best symbol of this one leads by more than rounding of the features changes.
    model = make_ctc_model(tokenizer, features, seed=37)
    folder = tmp_path / "onnx"
    graphs = export_onnx(ModelFile(model, tokenizer), folder, OnnxOptions(int8=True), "tests")
    plain, _ = verify(model, tokenizer, graphs, folder, audio)
    assert plain.exact, "\n".join(plain.lines())
    texts = [pair.ours for pair in plain.texts]
    assert len(texts[0].split()) > 5
    assert len({word for text in texts for word in text.split()}) > 5
    properties = onnx.load(folder / "model.onnx", load_external_data=False).metadata_props
    metadata = {each.key: each.value for each in properties}
    assert metadata["model_type"] == "EncDecCTCModelBPE"
    assert metadata["vocab_size"] == str(model.vocab_size - 1)
    assert metadata["normalize_type"] == "per_feature"
    assert "--nemo-ctc-model=model.onnx" in use_of_export(folder, "onnx")
    recogniser = pruned_rnnt.load(folder)
    found = [" ".join(recogniser.transcribe(path).text.split()) for path in audio]
    # sherpa-onnx leaves out a last frame with less audio than the others.
    assert [text[: len(short)] for text, short in zip(found, texts, strict=True)] == texts


@pytest.mark.parametrize("name", ["nemo_rnnt", "nemo_tdt"])
def test_the_decoder_has_the_outputs_of_the_predictor(name: str, tmp_path: Path) -> None:
    model = import_model(written(name, tmp_path)).model
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
    found = import_model(written("nemo_rnnt", tmp_path))
    parts = ModelFile(found.model, found.tokenizer)
    for options, message in (
        (OnnxOptions(streaming=True), "deviation in the whole utterance, which a stream"),
        (OnnxOptions(fp16=True), "--fp16 does not work for a model of model.encoder.features"),
    ):
        with pytest.raises(ExportError, match=message):
            export_onnx(parts, tmp_path / "onnx", options, "tests")
    folder = tmp_path / "ctc"
    folder.mkdir()
    ctc = import_model(written("nemo_ctc", folder))
    with pytest.raises(ExportError, match="deviation in the whole utterance, which a stream"):
        export_onnx(ModelFile(ctc.model, ctc.tokenizer), folder, OnnxOptions(streaming=True), "t")
    config: FastConformerConfig = tiny_fastconformer(features="fbank", num_mel_bins=80)
    own = tiny_model(config, len(found.tokenizer))
    with pytest.raises(ExportError, match=r"fastconformer, .* with model\.encoder\.features=fbank"):
        export_onnx(ModelFile(own, found.tokenizer), tmp_path / "own", OnnxOptions(), "tests")


def test_differences_are_listed(tmp_path: Path) -> None:
    folders = tmp_path / "rnnt", tmp_path / "tdt"
    for folder in folders:
        folder.mkdir()
    rnnt = import_model(written("nemo_rnnt", folders[0])).model
    tdt = import_model(written("nemo_tdt", folders[1])).model
    ten = DecodeConfig(max_symbols_per_frame=10)
    assert len(list(differences(rnnt, ten))) == 1
    assert len(list(differences(rnnt, DecodeConfig()))) == 2
    assert len(list(differences(tdt, DecodeConfig()))) == 1
    assert "at most 5 symbols" in list(differences(tdt, ten))[1]
