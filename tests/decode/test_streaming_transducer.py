"""Streaming greedy search against greedy search over whole utterances."""

from __future__ import annotations

import pytest
import torch

from pruned_rnnt.decode.search.greedy import greedy_search
from pruned_rnnt.decode.search.streaming_greedy import StreamingGreedySearch
from pruned_rnnt.model.transducer_model import TransducerModel
from tests.tiny_models import tiny_conformer, tiny_model

UNKNOWN = 2


def make_model(chunk_size: int, left_chunks: int) -> TransducerModel:
    """A causal model whose decisions are never close."""
    chunks = {"causal": True, "chunk_size": chunk_size, "left_chunks": left_chunks}
    model = tiny_model(tiny_conformer(num_mel_bins=20, layers=2, kernel_size=5, **chunks))
    with torch.no_grad():
        model.predictor.convolution.weight.mul_(4)
    return model


@pytest.mark.parametrize(("chunk_size", "left_chunks"), [(1, 3), (4, 1), (6, 4), (100, 0)])
def test_stream_equals_the_whole_utterance(chunk_size: int, left_chunks: int) -> None:
    model = make_model(chunk_size, left_chunks)
    stream = StreamingGreedySearch(model, chunk_size, left_chunks * chunk_size, [UNKNOWN])
    lengths = torch.tensor([203, 90, 7, 3])
    features = torch.randn(4, 203, 20) * 6 - 7
    with torch.inference_mode():
        encoded, frames = model.encode(features, lengths)
    whole = greedy_search(model, encoded, frames, silent_symbols=[UNKNOWN])
    streamed = stream.recognise(features, lengths)
    assert [found.symbols for found in streamed] == [found.symbols for found in whole]
    assert [found.frames for found in streamed] == [found.frames for found in whole]
    for one, other in zip(streamed, whole, strict=True):
        assert one.score == pytest.approx(other.score, rel=1e-4, abs=1e-4)
    emitted = {symbol for found in whole for symbol in found.symbols}
    assert len(emitted) > 1, "the model emits too little for this test to mean anything"
    assert UNKNOWN not in emitted
    assert whole[3].symbols == ()


def test_chunk_without_lengths_is_full() -> None:
    model = make_model(4, 1)
    stream = StreamingGreedySearch(model, 4, 4)
    features = torch.randn(2, stream.encoder.input_frames, 20) * 6 - 7
    free, _ = stream(features, stream.start(2))
    full = torch.full((2,), stream.encoder.input_frames)
    bounded, state = stream(features, stream.start(2), full)
    assert torch.equal(free, bounded)
    assert free.shape == (2, 4, 1)
    assert state.encoder.processed_N.tolist() == [16, 16]
