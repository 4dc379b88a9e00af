"""Blocks of frames: the replay of a graph equals the plain loop, tested without a GPU.

Tests marked gpu test the capture itself. Here each replay runs the captured block again, on the
same buffers.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from pruned_rnnt.decode.fusion.build import SymbolBonus
from pruned_rnnt.decode.fusion.hotwords import Hotword, HotwordScorer
from pruned_rnnt.decode.search import frame_graph
from pruned_rnnt.decode.search.back_pointers import pending_trace
from pruned_rnnt.decode.search.beam import ModifiedBeamSearch
from pruned_rnnt.decode.search.greedy import GreedySearch
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.decode.search.states import Rows, start_predictor
from pruned_rnnt.model import captured_passes
from pruned_rnnt.ops.search.search_frames import BeamSteps
from tests.decode.search_model import VOCAB, encoded, make_model


class _NoStream:
    def __init__(self, device: torch.device) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


class _NoGraph:
    """Has a `replay` only after `_ReplayedBlock` gave it one."""


class _ReplayedBlock(frame_graph.FrameGraph):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._graph.replay = self._again

    def _again(self) -> None:
        for buffer, new in zip(self._outputs, self._block(), strict=True):
            buffer.copy_(new)


def replace_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let blocks of frames be "captured" on a CPU, by a normal call."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _NoGraph)
    monkeypatch.setattr(torch.cuda, "Stream", _NoStream)
    monkeypatch.setattr(torch.cuda, "current_stream", _NoStream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(captured_passes, "capturing", lambda *_: nullcontext())


@pytest.fixture
def no_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_cuda_graphs(monkeypatch)


@pytest.mark.parametrize("frames", [32, 33, 80])
@pytest.mark.parametrize("max_symbols", [1, 2])
@pytest.mark.usefixtures("no_cuda_graphs")
@torch.inference_mode()
def test_blocks_equal_the_loop(frames: int, max_symbols: int) -> None:
    model = make_model()
    search = GreedySearch(model, max_symbols_per_frame=max_symbols)
    graph = None
    for seed, lengths in enumerate([[frames, 1, frames - 5], [7, frames, 0]]):
        encoded_NTE, lengths_N = encoded(lengths, seed)
        start = start_predictor(model, len(lengths), torch.device("cpu"))
        expected = search.frames(encoded_NTE, lengths_N, start)
        am_NTD = model.joiner.encoder_proj(encoded_NTE)
        if graph is None:
            rows = frame_graph.graph_rows(len(lengths))
            graph = _ReplayedBlock(search._loop, rows, am_NTD, start)
        outputs, state = graph(am_NTD, lengths_N, start)
        symbols_NTM, scores_NTM = (output[:, :frames] for output in outputs)
        assert torch.equal(symbols_NTM, expected.symbols_NTM)
        torch.testing.assert_close(scores_NTM, expected.scores_NTM)
        torch.testing.assert_close(state, expected.state)
        assert (symbols_NTM >= 0).sum() > 5


def best_paths(steps: Rows, beam: Rows) -> list[list[Hypothesis]]:
    score_NB, order_NB = beam[0].sort(dim=1, descending=True, stable=True)
    return pending_trace(order_NB, score_NB, BeamSteps(*steps)).result()


@pytest.mark.parametrize("frames", [32, 33, 80])
@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.usefixtures("no_cuda_graphs")
@torch.inference_mode()
def test_blocks_of_a_beam_equal_the_loop(frames: int, fusion: bool) -> None:
    scorers = [HotwordScorer([Hotword(symbols=(1, 2), bonus=1.0)], VOCAB), SymbolBonus(0.3, VOCAB)]
    search = ModifiedBeamSearch(make_model(), beam_size=4, scorers=scorers if fusion else [])
    graph = None
    for seed, lengths in enumerate([[frames, 1, frames - 5], [7, frames, 0]]):
        encoded_NTE, lengths_N = encoded(lengths, seed)
        am_NTD = search.model.joiner.encoder_proj(encoded_NTE)
        start = search._start(len(am_NTD), am_NTD.device)
        loop = partial(search._loop, start)
        if graph is None:
            rows = frame_graph.graph_rows(len(lengths))
            graph = _ReplayedBlock(loop, rows, am_NTD, start.pack())
        expected = loop(am_NTD, lengths_N, start.pack())
        found = graph(am_NTD, lengths_N, start.pack())
        for ours, theirs in zip(best_paths(*found), best_paths(*expected), strict=True):
            assert len(ours) == len(theirs) > 0
            for one, other in zip(ours, theirs, strict=True):
                assert (one.symbols, one.frames) == (other.symbols, other.frames)
                assert one.score == pytest.approx(other.score)
                assert one.symbol_scores == pytest.approx(other.symbol_scores)


def test_rows_are_powers_of_two() -> None:
    assert [frame_graph.graph_rows(n) for n in (1, 2, 3, 8, 9, 32)] == [1, 2, 4, 8, 16, 32]


@pytest.mark.usefixtures("no_cuda_graphs")
def test_frequent_frames_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_graph, "FrameGraph", _ReplayedBlock)
    model = make_model()
    search, graphs = GreedySearch(model), frame_graph.FrameGraphs()
    start = start_predictor(model, 3, torch.device("cpu"))

    def uses_a_graph(frames: int) -> bool:
        am_NTD = torch.zeros(3, frames, 8)
        return graphs.loop(search._loop, am_NTD, start) != search._loop

    monkeypatch.setattr(search, "_loop", lambda am_NTD, lengths_N, state: ((am_NTD,), state))
    assert [uses_a_graph(20) for _ in range(4)] == [False, False, True, True]
    assert [uses_a_graph(0) for _ in range(4)] == [False] * 4
    assert uses_a_graph(33)
    assert uses_a_graph(32)  # a block of a longer batch
    graphs.clear()
    assert uses_a_graph(20)
