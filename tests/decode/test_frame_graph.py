"""Blocks of frames: the replay of a graph equals the plain loop, tested without a GPU.

Tests marked gpu test the capture itself. Here each replay runs the captured block again, on the
same buffers.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from pruned_rnnt.decode.search import frame_graph
from pruned_rnnt.decode.search.greedy import GreedySearch
from pruned_rnnt.decode.search.rows import start_predictor
from tests.decode.search_model import encoded, make_model


class _NoStream:
    def __init__(self, device: torch.device) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


class _NoGraph:
    def capture_begin(self, capture_error_mode: str) -> None:
        pass

    def capture_end(self) -> None:
        pass


class _ReplayedBlock(frame_graph.FrameGraph):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._graph.replay = self._again

    def _again(self) -> None:
        buffers = (self._symbols_RKM, self._scores_RKM)
        for buffer, new in zip(buffers, self._block(), strict=True):
            buffer.copy_(new)


@pytest.mark.parametrize("frames", [32, 33, 80])
@pytest.mark.parametrize("max_symbols", [1, 2])
@torch.inference_mode()
def test_blocks_equal_the_loop(
    frames: int, max_symbols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _NoGraph)
    monkeypatch.setattr(torch.cuda, "Stream", _NoStream)
    monkeypatch.setattr(torch.cuda, "current_stream", _NoStream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
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
        symbols_NTM, scores_NTM, state = graph(am_NTD, lengths_N, start)
        assert torch.equal(symbols_NTM, expected.symbols_NTM)
        torch.testing.assert_close(scores_NTM, expected.scores_NTM)
        torch.testing.assert_close(state, expected.state)
        assert (symbols_NTM >= 0).sum() > 5


def test_rows_are_powers_of_two() -> None:
    assert [frame_graph.graph_rows(n) for n in (1, 2, 3, 8, 9, 32)] == [1, 2, 4, 8, 16, 32]
