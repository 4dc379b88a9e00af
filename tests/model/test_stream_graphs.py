"""Chunks of streams with CUDA graphs against the same chunks without.

Tests marked gpu test the capture itself. Without a GPU, each replay runs the captured pass again,
on the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pruned_rnnt.decode.build_search import build_stream_search, new_greedy_search
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.encode import choose_graphs
from pruned_rnnt.decode.search.streaming import StreamDecoder
from pruned_rnnt.model import inference_graphs
from pruned_rnnt.model.captured_passes import SharedBuffers
from pruned_rnnt.model.encoder import EncoderConfig
from pruned_rnnt.model.encoder_kinds import stream_encoder
from pruned_rnnt.model.inference_graphs import GraphMemory, InferenceGraphs, StreamGraphs
from tests.tiny_models import tiny_conformer, tiny_fastconformer, tiny_model, tiny_zipformer

ENCODERS = [
    tiny_conformer(causal=True),
    tiny_fastconformer(causal=True, feature_norm="none", convolution_norm="layer"),
    tiny_zipformer(causal=True),
]
# Rows of the graphs: 3, 6, 4 and 3 again.
STREAMS = [3, 3, 5, 3, 6, 4, 5, 4, 3, 4, 5]


class RunAgain:
    """In place of a graph: runs the captured pass again, which may have other buffers by now."""

    def __init__(self, run: Callable[[], torch.Tensor], output: torch.Tensor) -> None:
        self.replay = lambda: output.copy_(run())


def run_twice(
    run: Callable[[], torch.Tensor], device: Any, pool: Any, stream: Any
) -> tuple[RunAgain, torch.Tensor]:
    run()
    output = run()
    return RunAgain(run, output), output


class CpuGraphs(StreamGraphs):
    """Captures every shape, without a GPU."""

    def find(self, encoder: Any, shape: Any, capture: Callable[[GraphMemory], Any]) -> Any:
        if shape not in self._graphs:
            buffers = SharedBuffers(torch.device("cpu"))
            self._memory = self._memory or GraphMemory(pool=None, stream=None, buffers=buffers)
            self._graphs[shape] = capture(self._memory)
        return self._graphs[shape]


@pytest.fixture(params=ENCODERS, ids=lambda each: each.kind)
def encoder(request: pytest.FixtureRequest) -> EncoderConfig:
    return request.param  # type: ignore[no-any-return]


@torch.inference_mode()
def check_chunks(
    config: EncoderConfig, graphs: StreamGraphs, device: str, dtype: torch.dtype, bound: float
) -> None:
    """Streams that join, leave and end, each with its own state."""
    torch.manual_seed(0)
    model = tiny_model(config).eval().to(device)
    encoder = stream_encoder(model.encoder, *config.stream_sizes)
    states = [encoder.pack(encoder.start(1)) for _ in range(max(STREAMS))]
    others = list(states)
    for place, streams in enumerate(STREAMS):
        shape = streams, encoder.input_frames, config.num_mel_bins
        features_NTF = torch.randn(shape, device=device)
        lengths = None
        if place % 2:
            lengths = torch.randint(1, encoder.input_frames + 1, (streams,))
        valid = encoder.input_frames if lengths is None else lengths
        frames_N = encoder.output_length(torch.as_tensor(valid).expand(streams))
        before = tuple(torch.cat(parts) for parts in zip(*states[:streams], strict=True))
        same = tuple(torch.cat(parts) for parts in zip(*others[:streams], strict=True))
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            encoded_NCE, after = graphs(encoder, features_NTF, before, lengths)
            wanted_NCE, wanted = encoder(features_NTF, encoder.unpack(same), lengths)
        for got_CE, wanted_CE, frames in zip(
            encoded_NCE, wanted_NCE, frames_N.tolist(), strict=True
        ):
            error = (got_CE[:frames] - wanted_CE[:frames]).float().norm()
            assert error <= bound * wanted_CE[:frames].float().norm()
        for stream in range(streams):
            kept = [x[stream : stream + 1] for x in encoder.pack(wanted)]
            others[stream] = tuple(
                x.to(one.dtype) for x, one in zip(kept, others[stream], strict=True)
            )
            states[stream] = tuple(x[stream : stream + 1] for x in after)
        if lengths is not None:  # these streams have ended
            start = encoder.pack(encoder.start(1))
            states[:streams] = others[:streams] = [start] * streams


def test_replays_equal_the_encoder(encoder: EncoderConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_graphs, "captured", run_twice)
    graphs = CpuGraphs()
    check_chunks(encoder, graphs, "cpu", torch.float32, 1e-5)
    assert list(graphs._graphs) == [3, 6, 4]


def test_many_streams_and_none_run_without_graphs() -> None:
    config = tiny_conformer(causal=True)
    encoder = stream_encoder(tiny_model(config).encoder, *config.stream_sizes)
    graphs = CpuGraphs()
    for streams in (0, 257):
        features_NTF = torch.zeros(streams, encoder.input_frames, config.num_mel_bins)
        state = encoder.pack(encoder.start(streams))
        with torch.inference_mode():
            encoded_NCE, _ = graphs(encoder, features_NTF, state, None)
        assert encoded_NCE.size(0) == streams
    assert not graphs._graphs


def test_streams_use_graphs_where_whole_utterances_do(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    call = StreamGraphs.__call__
    monkeypatch.setattr(
        StreamGraphs, "__call__", lambda self, *rest: used.append(1) or call(self, *rest)
    )
    config = tiny_conformer(causal=True)
    model = tiny_model(config).eval()
    decoder = StreamDecoder(model, new_greedy_search(model), *config.stream_sizes)
    features_NTF = torch.randn(2, 90, config.num_mel_bins)
    without = decoder.recognise(features_NTF, torch.tensor([90, 61]))
    assert not used
    model.inference_graphs = InferenceGraphs()
    assert decoder.recognise(features_NTF, torch.tensor([90, 61])) == without
    assert used


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_chunks_equal_the_encoder(encoder: EncoderConfig, dtype: torch.dtype) -> None:
    graphs = StreamGraphs()
    check_chunks(encoder, graphs, "cuda", dtype, 1e-4 if dtype == torch.float32 else 0.03)
    assert not graphs._failed
    assert len(graphs._graphs) >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["greedy", "modified_beam"])
def test_streams_find_the_same_with_graphs(method: str, encoder: EncoderConfig) -> None:
    torch.manual_seed(0)
    model = tiny_model(encoder).eval().cuda()
    features_NTF = torch.randn(5, 900, encoder.num_mel_bins)
    lengths_N = torch.tensor([900, 131, 90, 500, 3])
    search = build_stream_search(model, DecodeConfig(method=method))
    expected = StreamDecoder(model, search, *encoder.stream_sizes).recognise(
        features_NTF.cuda(), lengths_N
    )
    choose_graphs("auto", model)
    decoder = StreamDecoder(model, search, *encoder.stream_sizes)
    for _ in range(2):
        found = decoder.recognise(features_NTF.cuda(), lengths_N)
    assert decoder._graphs._graphs
    assert [each.symbols for each in found] == [each.symbols for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.score == pytest.approx(other.score, rel=1e-3, abs=1e-2)
