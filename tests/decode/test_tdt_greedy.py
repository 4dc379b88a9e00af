"""Greedy search of models with durations: batches, streams and blocks against a plain loop."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from pruned_rnnt.decode.build_search import new_greedy_search
from pruned_rnnt.decode.search.greedy import GreedySearch
from pruned_rnnt.decode.search.streaming import StreamDecoder
from pruned_rnnt.decode.search.tdt_greedy import TdtGreedySearch, _GraphWalk, _Walk
from pruned_rnnt.model.captured_passes import CAPTURE_AT, SharedBuffers
from pruned_rnnt.model.speech_model import TransducerModel
from tests.decode.search_model import UNKNOWN, encoded, make_model
from tests.decode.test_frame_graph import replace_cuda_graphs
from tests.tiny_models import tiny_conformer, tiny_model


class Path(NamedTuple):
    symbols: tuple[int, ...] = ()
    frames: tuple[int, ...] = ()
    durations: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    total: float = 0.0


@torch.no_grad()
def greedy_by_hand(
    model: TransducerModel, frames: Tensor, max_symbols: int, silent: set[int]
) -> Path:
    """One utterance, one arc at a time."""
    durations = model.loss_config.durations
    shortest = min(d for d in durations if d > 0)
    path, t, here = Path(), 0, 0
    output, state = model.predictor.start(1, frames.device)
    while t < len(frames):
        logits, duration_logits = model.joiner.with_durations(
            model.joiner.encoder_proj(frames[t]), model.joiner.decoder_proj(output[0])
        )
        log_probs, log_durations = logits.log_softmax(0), duration_logits.log_softmax(0)
        symbol, duration = int(log_probs.argmax()), durations[int(log_durations.argmax())]
        emits = symbol not in silent
        here += emits
        if duration == 0 and (not emits or here == max_symbols):
            duration = shortest
        score = float(log_probs[symbol])
        path = path._replace(
            total=path.total + score + float(log_durations[durations.index(duration)])
        )
        if emits:
            path = Path(
                (*path.symbols, symbol),
                (*path.frames, t),
                (*path.durations, duration),
                (*path.scores, score),
                path.total,
            )
            output, state = model.predictor.step(torch.tensor([symbol]), state)
        t += duration
        here = 0 if duration > 0 else here
    return path


@pytest.mark.parametrize("durations", [(0, 1, 2, 3, 4), (1, 0), (1, 3)])
@pytest.mark.parametrize("max_symbols", [1, 3])
@pytest.mark.parametrize("silent", [(), (UNKNOWN,)])
@pytest.mark.parametrize("lstm", [False, True])
def test_greedy_in_a_batch_equals_greedy_by_hand(
    durations: tuple[int, ...], max_symbols: int, silent: tuple[int, ...], lstm: bool
) -> None:
    model = make_model(durations=durations, lstm=lstm)
    search = TdtGreedySearch(model, max_symbols_per_frame=max_symbols, silent_symbols=silent)
    frames, lengths = encoded([40, 1, 23, 0, 31])
    found = search(frames, lengths)
    assert sum(len(hypothesis.symbols) for hypothesis in found) > 4
    assert {d for hypothesis in found for d in hypothesis.durations} <= set(durations)
    for n, hypothesis in enumerate(found):
        wanted = greedy_by_hand(model, frames[n, : lengths[n]], max_symbols, {0, *silent})
        assert (hypothesis.symbols, hypothesis.frames) == wanted[:2]
        assert hypothesis.durations == wanted.durations
        assert hypothesis.symbol_scores == pytest.approx(wanted.scores, abs=1e-4)
        assert hypothesis.score == pytest.approx(wanted.total, abs=1e-3)


@pytest.mark.parametrize(("chunk_size", "left_chunks"), [(1, 3), (4, 1), (100, 0)])
def test_stream_equals_the_whole_utterance(chunk_size: int, left_chunks: int) -> None:
    chunks = {"causal": True, "chunk_size": chunk_size, "left_chunks": left_chunks}
    encoder = tiny_conformer(num_mel_bins=20, layers=2, kernel_size=5, **chunks)
    model = tiny_model(encoder, durations=(0, 1, 2, 3, 4))
    search = new_greedy_search(model, [UNKNOWN])
    stream = StreamDecoder(model, search, chunk_size, left_chunks * chunk_size)
    lengths = torch.tensor([203, 90, 7, 3])
    features = torch.randn(4, 203, 20, generator=torch.Generator().manual_seed(0)) * 6 - 7
    with torch.inference_mode():
        encoder_output = model.encode(features, lengths)
    whole = TdtGreedySearch(model, silent_symbols=[UNKNOWN])(*encoder_output)
    streamed = stream.recognise(features, lengths)
    for one, other in zip(streamed, whole, strict=True):
        assert one.symbols == other.symbols
        assert (one.frames, one.durations) == (other.frames, other.durations)
        assert one.score == pytest.approx(other.score, rel=1e-4, abs=1e-4)
    assert len(whole[0].symbols) > 5
    assert {d > 1 for d in whole[0].durations} == {True, False}


@torch.inference_mode()
def test_blocks_equal_single_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, a replay runs the captured block again; tests marked gpu test the capture."""
    replace_cuda_graphs(monkeypatch)
    model = make_model(durations=(0, 1, 2))
    search = TdtGreedySearch(model, silent_symbols=[UNKNOWN])
    walk = None
    for seed, lengths in enumerate([[80, 1, 75], [7, 30], [0, 64, 33, 2]]):
        frames_NTE, lengths_N = encoded(lengths, seed)
        start = search.start(len(lengths), torch.device("cpu"))
        wanted = search.frames(frames_NTE, lengths_N, start)
        am_NTD = model.joiner.encoder_proj(frames_NTE)
        if walk is None:
            walk = _GraphWalk(search, (4, 128), am_NTD, start, SharedBuffers(am_NTD.device))
            walk._graph.replay = walk._block
        walk.begin(am_NTD, lengths_N, start)
        walk.run()
        found = walk.results(*am_NTD.shape[:2])
        assert torch.equal(found.symbols_NTM, wanted.symbols_NTM)
        torch.testing.assert_close(found.state, wanted.state)
        torch.testing.assert_close(found.scores_NTM, wanted.scores_NTM)
        torch.testing.assert_close(found.score_N, wanted.score_N)
        emits = wanted.symbols_NTM >= 0
        assert torch.equal(found.durations_NTM[emits], wanted.durations_NTM[emits])
        assert emits.any()


class _OnGpu(Tensor):
    """A tensor on the CPU that says otherwise."""

    is_cuda = True


@torch.inference_mode()
def test_graphs_are_made_for_frequent_or_long_batches_and_share_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace_cuda_graphs(monkeypatch)
    search = TdtGreedySearch(make_model(durations=(0, 1, 2)))

    def walk(rows: int, frames: int) -> _Walk:
        start = search.start(rows, torch.device("cpu"))
        return search._walk(torch.zeros(rows, frames, 8).as_subclass(_OnGpu), start)

    long = walk(4, 100)
    assert isinstance(long, _GraphWalk)
    for _ in range(CAPTURE_AT - 1):
        assert type(walk(3, 20)) is _Walk
    short = walk(3, 20)
    assert isinstance(short, _GraphWalk)
    assert walk(4, 30) is short
    for one, other in zip(
        (short._am_RTD, short._symbols, short._scores),
        (long._am_RTD, long._symbols, long._scores),
        strict=True,
    ):
        assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("lstm", [False, True])
@pytest.mark.parametrize("frames", [20, 100])
def test_greedy_matches_the_cpu(lstm: bool, frames: int) -> None:
    model = make_model(lstm=lstm, durations=(0, 1, 2, 3, 4))
    lengths = [min(length, frames) for length in (100, 1, 64, 33, 0)]
    batches = [encoded(lengths, seed) for seed in range(3)]
    wanted = [TdtGreedySearch(model, silent_symbols=[UNKNOWN])(*batch) for batch in batches]
    search = TdtGreedySearch(model.cuda(), silent_symbols=[UNKNOWN])
    for (frames_NTE, lengths_N), hypotheses in zip(batches, wanted, strict=True):
        found = search(frames_NTE.cuda(), lengths_N)
        for one, other in zip(found, hypotheses, strict=True):
            assert (one.symbols, one.frames) == (other.symbols, other.frames)
            assert one.durations == other.durations
            assert one.score == pytest.approx(other.score, rel=1e-3, abs=1e-2)


def test_models_get_their_own_search() -> None:
    with pytest.raises(ValueError, match="use TdtGreedySearch"):
        GreedySearch(make_model(durations=(0, 1)))
    with pytest.raises(ValueError, match="max_symbols_per_frame is 0"):
        TdtGreedySearch(make_model(durations=(0, 1)), max_symbols_per_frame=0)
