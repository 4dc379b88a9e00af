"""Exported Zipformers: onnxruntime matches torch, and sherpa-onnx gives our texts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.export.graphs import Graph, export_program
from pruned_rnnt.export.model_file import ModelFile
from pruned_rnnt.export.onnx_folder import OnnxOptions, encoder_graph, export_onnx
from pruned_rnnt.export.streaming_graphs import StreamingZipformerGraph
from pruned_rnnt.export.verify import Verification, run_recognise, verify
from pruned_rnnt.model.predictor import PredictorConfig
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.model.zipformer import ZipformerConfig
from pruned_rnnt.system.usage_errors import ExportError
from pruned_rnnt.transcribe.recogniser import Recogniser
from tests.export.tone_corpus import TONES, sing
from tests.tiny_models import tiny_model

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("sherpa_onnx")
onnxruntime = pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["one two three", "four five"], TokenizerConfig(kind="char"))


@pytest.fixture(scope="module")
def audio(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Eight files, of 0.05 s to some seconds."""
    rng = np.random.default_rng(3)
    folder = tmp_path_factory.mktemp("audio")
    sounds = [sing(list(rng.choice(list(TONES), size=count)), rng) for count in (1, 2, 3, 4, 6, 9)]
    paths = []
    for index, samples in enumerate([*sounds, sounds[-1][:800], sounds[-1][:2000]]):
        paths.append(folder / f"{index}.wav")
        soundfile.write(paths[-1], samples, 16000)
    return paths


def make_model(vocab_size: int, **changes: object) -> TransducerModel:
    """Random parameters, with a joiner that amplifies differences between frames to emit more."""
    settings: dict[str, object] = {
        "downsampling": (1, 2),
        "layers": (1, 1),
        "dims": (32, 48),
        "unmasked_dims": (16, 24),
        "feedforward_dims": (48, 64),
        "heads": (2, 4),
        "kernel_sizes": (7, 5),
        "query_head_dim": 8,
        "value_head_dim": 6,
        "position_dim": 12,
        "chunk_sizes": (8, 16, -1),
        "left_contexts": (16, 32, -1),
        "chunk_size": 16,
        "left_context": 32,
        **changes,
    }
    encoder = ZipformerConfig(**settings)  # type: ignore[arg-type]
    model = tiny_model(encoder, vocab_size, predictor=PredictorConfig(dim=16), joiner_dim=24)
    with torch.no_grad():
        encoded_NTE, _ = model.encode(torch.randn(1, 200, 80) * 3 - 6, torch.tensor([200]))
        projection = model.joiner.encoder_proj
        projection.weight.mul_(3.0)
        projection.bias.copy_(-projection.weight @ encoded_NTE.mean(dim=(0, 1)))
        model.joiner.output_linear.bias[0] -= 4.0
    return model


def check(found: list[Verification]) -> None:
    """Texts and outputs are equal, and the texts are long and different enough to compare."""
    assert found[0].exact, "\n".join(found[0].lines())
    assert sum(len(pair.ours) for pair in found[0].texts) > 100
    assert len({pair.ours for pair in found[0].texts}) > 5


def run_session(graph: Graph, session: object, *inputs: Tensor) -> list[Tensor]:
    feeds = {name: x.numpy() for name, x in zip(graph.input_names, inputs, strict=True)}
    return [torch.from_numpy(value) for value in session.run(None, feeds)]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_offline_zipformer(tokenizer: Tokenizer, audio: list[Path], tmp_path: Path) -> None:
    model = make_model(len(tokenizer))
    graphs = export_onnx(ModelFile(model, tokenizer), tmp_path, OnnxOptions(int8=True), "random")
    found = verify(model, tokenizer, graphs, tmp_path, audio)
    check(found)
    assert found[1].precision == "int8"
    assert not found[1].exact
    loaded = pruned_rnnt.load(tmp_path)
    ours = Recogniser(model, tokenizer)
    for path in audio[:6]:
        assert str(loaded.transcribe(path)) == str(ours.transcribe(path)) != ""
    # Times count frames of 40 ms, within the audio.
    for line in run_recognise(tmp_path, audio[3:6]):
        times = np.array(line["timestamps"]) / 0.04
        np.testing.assert_allclose(times, times.round(), atol=0.01)
        assert 0.5 * line["audio_seconds"] < max(line["timestamps"]) < line["audio_seconds"]

    session = onnxruntime.InferenceSession(tmp_path / "encoder.onnx")
    for lengths in ([9], [13, 9], [300, 9, 61, 150]):
        batch = torch.full((len(lengths), max(lengths), 80), 50.0)
        for n, length in enumerate(lengths):
            batch[n, :length] = torch.randn(length, 80) * 3 - 6
        frames, counts = run_session(graphs[0], session, batch, torch.tensor(lengths))
        assert counts.tolist() == [((length - 7) // 2 + 1) // 2 for length in lengths]
        for n, length in enumerate(lengths):
            with torch.inference_mode():
                alone = graphs[0].module(batch[n : n + 1, :length], torch.tensor([length]))[0][0]
            torch.testing.assert_close(frames[n, : len(alone)], alone, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_streaming_zipformer(tokenizer: Tokenizer, audio: list[Path], tmp_path: Path) -> None:
    import onnx

    model = make_model(len(tokenizer), causal=True)
    options = OnnxOptions(streaming=True, chunk=4, left=12)
    graphs = export_onnx(ModelFile(model, tokenizer), tmp_path, options, "random")
    found = verify(model, tokenizer, graphs, tmp_path, audio)
    check(found)
    assert any("quiet noise" in line for line in found[0].lines())
    words = str(pruned_rnnt.load(tmp_path).transcribe(audio[5])).split()
    (theirs,) = run_recognise(tmp_path, audio[5:6])
    # The noise after the sound differs at its beginning, and the model emits words for it.
    sounding = theirs["text"].split()[:-1]
    assert words[: len(sounding)] == sounding
    stored = onnx.load(tmp_path / "encoder.onnx")
    metadata = {prop.key: prop.value for prop in stored.metadata_props}
    assert metadata["model_type"] == "zipformer2"
    assert metadata["left_context_len"] == "24,12"
    assert (metadata["T"], metadata["decode_chunk_len"]) == ("29", "16")
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert (settings["chunk_frames"], settings["left_frames"]) == (4, 12)

    # sherpa-onnx batches streams of any age, and a stream equals the whole utterance.
    graph, module = graphs[0], graphs[0].module
    assert isinstance(module, StreamingZipformerGraph)
    session = onnxruntime.InferenceSession(tmp_path / "encoder.onnx")
    features = torch.randn(3, 6 * 16 + 13, 80) * 3 - 6
    state, frames = module.start(3), []
    for begin in range(0, 6 * 16, 16):
        outputs = run_session(graph, session, features[:, begin : begin + 29], *state)
        state = module.advance(state, outputs)
        frames.append(outputs[0])
    assert state[-1].tolist() == [48, 48, 48]
    model.encoder.set_chunks(4, 12)
    with torch.inference_mode():
        encoded, _ = model.encode(features, torch.full((3,), features.size(1)))
        whole = model.joiner.encoder_proj(encoded)
    torch.testing.assert_close(torch.cat(frames, 1), whole[:, :24], rtol=1e-3, atol=1e-3)

    young = module.start(1)
    mixed = tuple(
        torch.cat((new, old.narrow(axis, 1, 1)), axis)
        for axis, new, old in zip(module.stream_axes, young, state, strict=True)
    )
    chunk = torch.randn(2, 29, 80) * 3 - 6
    together = run_session(graph, session, chunk, *mixed)[0]
    alone = run_session(graph, session, chunk[:1], *young)[0]
    torch.testing.assert_close(together[:1], alone, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, OnnxOptions(streaming=True), "not causal"),
        ({}, OnnxOptions(fp16=True), "--fp16 does not work for a Zipformer"),
        ({"causal": True}, OnnxOptions(streaming=True, chunk=3), "--chunk is 3"),
        ({"causal": True}, OnnxOptions(streaming=True, left=5), "--left is 5"),
        ({"causal": True}, OnnxOptions(streaming=True, left=-4), "--left is -4, needs"),
    ],
)
def test_impossible_zipformers_are_errors(
    changes: dict[str, object], options: OnnxOptions, message: str
) -> None:
    model = make_model(9, downsampling=(1, 4), **changes)
    with pytest.raises(ExportError, match=message) as error:
        encoder_graph(model, options)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.slow
def test_program_of_the_published_rates_takes_all_lengths() -> None:
    """Down to one frame in the slowest stack."""
    torch.manual_seed(0)
    model = make_model(9, downsampling=(1, 8)).eval()
    program = export_program(encoder_graph(model, OnnxOptions())).module()
    for batch, frames in ((2, 17), (1, 24), (3, 41), (2, 103), (5, 200)):
        features = torch.randn(batch, frames, model.encoder.config.num_mel_bins)
        lengths = torch.tensor([frames, *[17] * (batch - 1)])
        with torch.no_grad():
            encoded, encoded_lengths = model.encode(features, lengths)
            projected = model.joiner.encoder_proj(encoded)
        # A user need not switch gradients off.
        found, found_lengths = program(features, lengths)
        assert torch.equal(found_lengths, encoded_lengths)
        for row, length in enumerate(encoded_lengths.tolist()):
            torch.testing.assert_close(
                found[row, :length], projected[row, :length], rtol=1e-4, atol=1e-4
            )
