"""The ONNX graphs compute what the modules compute, for all input sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pruned_rnnt.export import graphs
from pruned_rnnt.export.graphs import Graph
from pruned_rnnt.export.streaming_graphs import StreamingConformerGraph
from pruned_rnnt.model.predictor import PredictorConfig
from pruned_rnnt.model.speech_model import TransducerModel
from pruned_rnnt.ops.search.beam_rows import joint_log_probs
from pruned_rnnt.system.usage_errors import ExportError
from tests.tiny_models import tiny_conformer, tiny_model

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

VOCAB = 9


def make_model(*, hat: bool = False, context_size: int = 2, **changes: object) -> TransducerModel:
    encoder = tiny_conformer(num_mel_bins=20, layers=2, kernel_size=5, **changes)
    predictor = PredictorConfig(dim=8, context_size=context_size)
    return tiny_model(encoder, VOCAB, predictor=predictor, joiner_dim=12, hat=hat)


def speech(*shape: int) -> Tensor:
    return torch.randn(*shape) * 4 - 7


def assert_same(graph: Graph, path: Path, *inputs: Tensor) -> list[Tensor]:
    """Run module and file; returns the file's outputs."""
    session = onnxruntime.InferenceSession(path)
    feeds = {name: x.numpy() for name, x in zip(graph.input_names, inputs, strict=True)}
    outputs = [torch.from_numpy(value) for value in session.run(None, feeds)]
    with torch.inference_mode():
        expected = graph.module(*inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for mine, other in zip(expected, outputs, strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(other, mine, rtol=1e-4, atol=1e-4)
    return outputs


@pytest.mark.slow
def test_offline_encoder(tmp_path: Path) -> None:
    model = make_model(feature_norm="utterance")
    graph = graphs.offline_encoder(model)
    path = tmp_path / "encoder.onnx"
    graphs.write_onnx(graph, path)
    for batch, frames in ((1, 7), (1, 10), (1, 400), (3, 61)):
        lengths = torch.tensor([frames, 9, 40][:batch])
        features = speech(batch, frames, 20)
        projected, _ = assert_same(graph, path, features, lengths)
        with torch.inference_mode():
            encoded, _ = model.encode(features, lengths)
            wanted = model.joiner.encoder_proj(encoded)
        torch.testing.assert_close(projected, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_streaming_encoder(tmp_path: Path) -> None:
    model = make_model(causal=True, chunk_size=4, left_chunks=2)
    graph = graphs.streaming_encoder(model, 4, 8)
    path = tmp_path / "encoder.onnx"
    graphs.write_onnx(graph, path)
    assert isinstance(graph.module, StreamingConformerGraph)
    stream = graph.module.stream
    features = speech(3, 5 * stream.shift + 3, 20)
    state, frames = graph.module.start(3), []
    for begin in range(0, 5 * stream.shift, stream.shift):
        chunk = features[:, begin : begin + stream.input_frames]
        outputs = assert_same(graph, path, chunk, *state)
        state = graph.module.advance(state, outputs)
        frames.append(outputs[0])
    with torch.inference_mode():
        encoded, _ = model.encode(features, torch.full((3,), features.size(1)))
        whole = model.joiner.encoder_proj(encoded)
    torch.testing.assert_close(torch.cat(frames, 1), whole, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("hat", "context_size"), [(False, 2), (True, 1)])
def test_decoder_and_joiner(hat: bool, context_size: int, tmp_path: Path) -> None:
    model = make_model(hat=hat, context_size=context_size)
    decoder, joiner = graphs.decoder(model), graphs.joiner(model)
    for graph in (decoder, joiner):
        graphs.write_onnx(graph, tmp_path / f"{graph.name}.onnx")
    for batch in (1, 4):
        contexts = torch.randint(-1, VOCAB, (batch, context_size))
        contexts[0] = model.predictor.start_context(1, contexts.device)[0]
        (predicted,) = assert_same(decoder, tmp_path / "decoder.onnx", contexts)
        frames = torch.randn(batch, 12)
        (logits,) = assert_same(joiner, tmp_path / "joiner.onnx", frames, predicted)
        with torch.inference_mode():
            wanted = joint_log_probs(model.joiner(frames, predicted), 0, hat)
        # sherpa-onnx applies a softmax to the logits.
        torch.testing.assert_close(logits.log_softmax(-1), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_torch_export_programs_accept_other_sizes(tmp_path: Path) -> None:
    model = make_model()
    for graph, inputs in (
        (graphs.offline_encoder(model), (speech(3, 77, 20), torch.tensor([77, 50, 9]))),
        (graphs.decoder(model), (torch.tensor([[-1, 0], [3, 4], [-1, -1]]),)),
    ):
        path = tmp_path / f"{graph.name}.pt2"
        torch.export.save(graphs.export_program(graph), path)
        found = torch.export.load(path).module()(*inputs)
        with torch.inference_mode():
            torch.testing.assert_close(found, graph.module(*inputs), rtol=1e-4, atol=1e-4)


def test_negative_ids_embed_to_zero() -> None:
    model = make_model()
    with torch.inference_mode():
        silent = graphs.decoder(model).module(torch.tensor([[-1, -1]]))
        wanted = model.joiner.decoder_proj(torch.zeros(1, 8))
    np.testing.assert_allclose(silent.numpy(), wanted.numpy(), atol=1e-6)


def test_what_an_onnx_file_cannot_hold_is_refused(tmp_path: Path) -> None:
    """Before it is traced, which takes minutes for such a model."""
    graph = Graph(
        name="encoder",
        module=torch.nn.Linear(2**15, 2**14, device="meta"),
        inputs=(),
        input_names=(),
        output_names=(),
        dynamic_axes=(),
    )
    with pytest.raises(ExportError, match=r"has 2\.15 GB of .* use --format torch"):
        graphs.write_onnx(graph, tmp_path / "encoder.onnx")
