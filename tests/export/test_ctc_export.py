"""Models of a CTC head alone: sherpa-onnx gives the texts of our greedy search."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import pruned_rnnt
from pruned_rnnt.data.audio.audio_file import read_audio
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.export.differences import differences
from pruned_rnnt.export.model_file import ModelFile, load_model
from pruned_rnnt.export.onnx_folder import OnnxOptions, encoder_graph, export_onnx
from pruned_rnnt.export.readme import use_of_export
from pruned_rnnt.export.torch_folder import export_torch
from pruned_rnnt.export.verify import run_recognise, verify
from pruned_rnnt.interop.icefall_model import export_icefall
from pruned_rnnt.model.build_model import as_transducer
from pruned_rnnt.model.encoder import EncoderConfig
from pruned_rnnt.model.model_config import LossConfig, ModelConfig
from pruned_rnnt.model.speech_model import CtcModel
from pruned_rnnt.system.usage_errors import ExportError
from pruned_rnnt.transcribe.recogniser import Recogniser
from tests.export.tone_corpus import make_corpus
from tests.tiny_models import tiny_conformer, tiny_model, tiny_zipformer


def make_model(encoder: EncoderConfig, vocab_size: int) -> CtcModel:
    """Random, with large and centred logits, so that texts are long and differ."""
    torch.manual_seed(0)
    loss = LossConfig(kind="ctc")
    model = CtcModel(ModelConfig(encoder=encoder), vocab_size, loss).eval()
    assert model.ctc_head is not None
    with torch.no_grad():
        encoded_NTE, _ = model.encode(torch.randn(1, 200, 80) * 3 - 6, torch.tensor([200]))
        model.ctc_head.weight.mul_(20.0)
        model.ctc_head.bias.copy_(-model.ctc_head.weight @ encoded_NTE.mean(dim=(0, 1)))
    return model


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("tones"))


@pytest.fixture(scope="module")
def tokenizer(corpus: Path) -> Tokenizer:
    return Tokenizer.load(corpus / "tokens")


@pytest.fixture(scope="module")
def audio(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    soundfile = pytest.importorskip("soundfile")
    folder, generator = tmp_path_factory.mktemp("audio"), torch.Generator().manual_seed(1)
    paths = [folder / f"{index}.wav" for index in range(8)]
    for index, path in enumerate(paths):
        loud = torch.rand(8 + index, generator=generator).repeat_interleave(2000)
        samples = 0.2 * loud * torch.randn(loud.shape, generator=generator)
        soundfile.write(path, samples.numpy(), 16000)
    return paths


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoder", "options"),
    [
        (tiny_conformer(), OnnxOptions(int8=True)),
        (tiny_zipformer(causal=True), OnnxOptions(streaming=True, chunk=4, left=8)),
    ],
    ids=["conformer", "streaming-zipformer"],
)
def test_sherpa_onnx_gives_the_same_texts(
    encoder: EncoderConfig,
    options: OnnxOptions,
    tokenizer: Tokenizer,
    audio: list[Path],
    tmp_path: Path,
) -> None:
    for name in ("onnx", "onnxruntime", "onnxscript", "sherpa_onnx"):
        pytest.importorskip(name)
    model = make_model(encoder, len(tokenizer))
    graphs = export_onnx(ModelFile(model, tokenizer), tmp_path, options, "random")
    assert [graph.name for graph in graphs] == ["model"]
    found = verify(model, tokenizer, graphs, tmp_path, audio)
    assert found[0].exact, "\n".join(found[0].lines())
    assert sum(len(pair.ours) for pair in found[0].texts) > 60
    assert len({pair.ours for pair in found[0].texts}) > 5
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["kind"] == "ctc"
    readme = use_of_export(tmp_path, "onnx")
    assert "CTC model" in readme
    assert "ctc-model=model.onnx" in readme
    assert "decode.skip_unknown is true" in readme
    if options.streaming:
        # Without the noise, texts are beginnings of those with it.
        with_noise = pruned_rnnt.load(tmp_path)
        settings["tail_seconds"] = 0
        (tmp_path / "settings.json").write_text(json.dumps(settings))
        without = pruned_rnnt.load(tmp_path)
        texts = [[model.transcribe(path).text for path in audio] for model in (with_noise, without)]
        assert all(long.startswith(short) for long, short in zip(*texts, strict=True))
        assert texts[0] != texts[1]
        return
    for line in run_recognise(tmp_path, audio[3:6]):
        assert 0.5 * line["audio_seconds"] < max(line["timestamps"]) < line["audio_seconds"]


@pytest.mark.slow
def test_one_file_for_torch(tokenizer: Tokenizer, audio: list[Path], tmp_path: Path) -> None:
    model = make_model(tiny_conformer(), len(tokenizer))
    export_torch(ModelFile(model, tokenizer, 3.0), tmp_path, OnnxOptions(), "random")
    loaded = load_model(tmp_path)
    assert isinstance(loaded.model, CtcModel)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value)
    recogniser = pruned_rnnt.load(tmp_path)
    text = recogniser.transcribe(audio[0]).text
    assert len(text) > 5
    program = torch.export.load(tmp_path / "model.pt2").module()
    features_NTF = torch.randn(1, 60, 80) * 3 - 6
    with torch.inference_mode():
        log_probs_NTV, lengths = program(features_NTF, torch.tensor([60]))
    torch.testing.assert_close(log_probs_NTV.exp().sum(2), torch.ones(1, int(lengths[0])))


def test_live_transcription_equals_the_whole_utterance(
    tokenizer: Tokenizer, audio: list[Path]
) -> None:
    model = make_model(tiny_conformer(causal=True), len(tokenizer))
    recogniser = Recogniser(model, tokenizer)
    stream, again = recogniser.stream(), recogniser.stream()
    samples_S = read_audio(audio[1])
    for begin in range(0, len(samples_S), 800):
        stream.accept_waveform(samples_S[begin : begin + 800])
        recogniser.step([stream])
    again.accept_waveform(samples_S)
    for each in (stream, again):
        each.finish()
        while recogniser.step([each]):
            pass
    (final,) = stream.take_finals()
    assert again.take_finals() == [final]
    assert len(final.text) > 5


def test_exports_that_are_not_possible(tokenizer: Tokenizer, tmp_path: Path) -> None:
    conformer = make_model(tiny_conformer(causal=True), len(tokenizer))
    with pytest.raises(ExportError, match=r"needs model\.encoder\.kind=zipformer"):
        encoder_graph(conformer, OnnxOptions(streaming=True))
    with pytest.raises(ValueError, match="--format icefall needs a transducer"):
        export_icefall(as_transducer(conformer, "--format icefall"), tokenizer, tmp_path)


def test_differences_of_transducers_name_ctc_searches() -> None:
    model = tiny_model(rnnt_type="modified")
    (line,) = differences(model, DecodeConfig(method="ctc_greedy"))
    assert "sherpa-onnx searches with predictor and joiner" in line
