"""Searches that continue from chunk to chunk, against those of whole utterances."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pruned_rnnt.data.tokens.train_tokenizer import TokenizerConfig, train_tokenizer
from pruned_rnnt.decode.build_search import build_search, build_stream_search
from pruned_rnnt.decode.decode_config import DecodeConfig
from pruned_rnnt.decode.fusion.build import FusionConfig
from pruned_rnnt.decode.search.interface import Continuation, Hypothesis
from pruned_rnnt.decode.search.streaming import StreamDecoder, StreamPath
from pruned_rnnt.model.speech_model import TransducerModel
from tests.tiny_models import tiny_conformer, tiny_model

UNKNOWN = 2
# A tokenizer of as many symbols as the models have.
SEVEN = train_tokenizer(["abc cba"], TokenizerConfig(kind="char"))
BEAM = {"method": "modified_beam", "beam_size": 6}
SEARCHES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({}, BEAM),
    ({}, {**BEAM, "length_norm": False, "fusion": FusionConfig(symbol_bonus=0.3)}),
    ({"durations": (0, 1, 2, 3, 4)}, {}),
    ({"durations": (0, 1, 2, 3)}, BEAM),
    ({"durations": (0, 1, 2)}, {**BEAM, "fusion": FusionConfig(symbol_bonus=0.3)}),
    ({"ctc_scale": 0.2}, {"method": "ctc_greedy"}),
]


def make_model(chunk_size: int, left_chunks: int, **loss: Any) -> TransducerModel:
    """A causal model whose decisions are never close."""
    chunks = {"causal": True, "chunk_size": chunk_size, "left_chunks": left_chunks}
    encoder = tiny_conformer(num_mel_bins=20, layers=2, kernel_size=5, **chunks)
    model = tiny_model(encoder, **loss)
    with torch.no_grad():
        model.predictor.convolution.weight.mul_(4)
    return model


@pytest.mark.parametrize(("chunk_size", "left_chunks"), [(1, 3), (4, 1), (6, 4), (100, 0)])
@pytest.mark.parametrize(("loss", "decode"), SEARCHES)
def test_stream_equals_the_whole_utterance(
    chunk_size: int, left_chunks: int, loss: dict[str, Any], decode: dict[str, Any]
) -> None:
    model, config = make_model(chunk_size, left_chunks, **loss), DecodeConfig(**decode)
    search = build_stream_search(model, config, SEVEN)
    stream = StreamDecoder(model, search, chunk_size, left_chunks * chunk_size)
    lengths = torch.tensor([207, 111, 7, 3])  # 51, 27, 1 and 0 encoder frames
    features = torch.randn(4, 207, 20, generator=torch.Generator().manual_seed(0)) * 6 - 7
    with torch.inference_mode():
        encoded = model.encode(features, lengths)
    whole = [found[0] for found in build_search(model, config, SEVEN)(*encoded)]
    streamed = stream.recognise(features, lengths)
    if chunk_size == 1 and loss.get("durations") and config.method == "modified_beam":
        # The end is not known when arcs of the last frames are chosen: other paths are pruned.
        assert all(len(found.symbols) > 5 for found in streamed[:2])
        return
    for one, other in zip(streamed, whole, strict=True):
        assert (one.symbols, one.frames) == (other.symbols, other.frames)
        assert one.durations == other.durations
        assert one.score == pytest.approx(other.score, rel=1e-4, abs=1e-4)
        assert one.symbol_scores == pytest.approx(other.symbol_scores, rel=1e-3, abs=1e-3)
    emitted = {symbol for found in whole for symbol in found.symbols}
    assert len(emitted) > 1, "the model emits too little for this test to mean anything"
    assert UNKNOWN not in emitted
    assert whole[3].symbols == ()


def test_chunk_without_lengths_is_full() -> None:
    model = make_model(4, 1)
    stream = StreamDecoder(model, build_stream_search(model, DecodeConfig()), 4, 4)
    features = torch.randn(2, stream.encoder.input_frames, 20) * 6 - 7
    free = stream.chunk(features, stream.start(2))
    full = torch.full((2,), stream.encoder.input_frames)
    bounded = stream.chunk(features, stream.start(2), full)
    assert free.found.result() == bounded.found.result()
    torch.testing.assert_close(free.state, bounded.state)
    assert stream.encoder.unpack(free.state[:3]).processed_N.tolist() == [16, 16]


@pytest.mark.parametrize(("loss", "decode"), SEARCHES)
def test_stable_symbols_are_never_taken_back(loss: dict[str, Any], decode: dict[str, Any]) -> None:
    model = make_model(4, 1, **loss)
    stream = StreamDecoder(model, build_stream_search(model, DecodeConfig(**decode), SEVEN), 4, 4)
    state, path = stream.start(1), StreamPath()
    generator = torch.Generator().manual_seed(0)
    shown: list[int] = []
    for _ in range(20):
        chunk = torch.randn(1, stream.encoder.input_frames, 20, generator=generator) * 6 - 7
        state, found, _ = stream.chunk(chunk, state)
        path.extend(found.result()[0], 4)
        now = [arc.symbol for arc in path.best[: path.stable]]
        assert path.settled <= path.stable
        assert now[: len(shown)] == shown
        shown = now
        assert [arc.frame for arc in path.best] == sorted(arc.frame for arc in path.best)
    assert len(shown) >= 5


def test_paths_that_differ_are_tentative() -> None:
    def continuation(row: int, origin: int, *symbols: int) -> Continuation:
        count = len(symbols)
        part = Hypothesis(
            symbols=symbols, frames=tuple(range(count)), score=-row, symbol_scores=(-1.0,) * count
        )
        return Continuation(row, origin, part)

    path = StreamPath()
    path.extend([continuation(1, 0, 3, 4), continuation(0, 0, 3, 5, 6)], 8)
    assert [arc.symbol for arc in path.best] == [3, 4]
    assert (path.stable, path.settled) == (1, 1)
    path.extend([continuation(2, 0, 7), continuation(0, 0)], 8)
    assert [(arc.symbol, arc.frame) for arc in path.best] == [(3, 0), (5, 1), (6, 2), (7, 8)]
    assert (path.stable, path.settled) == (3, 3)
    path.extend([continuation(0, 2, 4, 5), continuation(1, 0, 7, 5)], 8)
    assert path.hypothesis().symbols == (3, 5, 6, 7, 4, 5)
    assert (path.stable, path.settled) == (4, 3)  # the symbol 7 at the frames 8 and 16
    assert [arc.symbol for arc in path.drop(2)] == [3, 5]
    assert path.hypothesis().frames == (2, 8, 16, 17)
    assert (path.stable, path.settled) == (2, 1)
    path.restart()
    assert (path.best, path.frame) == ([], 24)


def test_searches_of_whole_utterances_are_refused() -> None:
    model = make_model(4, 1, ctc_scale=0.2)
    with pytest.raises(ValueError, match=r"decode\.method is ctc_prefix_beam, which needs whole"):
        build_stream_search(model, DecodeConfig(method="ctc_prefix_beam"))
