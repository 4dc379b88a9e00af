"""The inputs of captured passes, and failed captures; passes: test_encoder_graphs.py."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pruned_rnnt.model.captured_passes import CapturedPasses, capturing
from pruned_rnnt.model.encoder_graphs import EncoderGraphs, _Replay
from pruned_rnnt.model.zipformer.schedule import Recorder


def test_a_batch_is_padded_and_its_first_utterances_are_repeated() -> None:
    no_graph: Any = None
    unused = torch.empty(0)
    passes = CapturedPasses(
        forward=no_graph,
        backward=no_graph,
        program=(),
        features_NTF=torch.full((5, 6, 2), -1.0),
        lengths_N=torch.full((5,), -1),
        encoded_NTE=unused,
        grad_NTE=unused,
    )
    features, lengths = torch.randn(3, 4, 2), torch.tensor([4, 3, 2])
    passes.fill(features, lengths)
    assert torch.equal(passes.features_NTF[:, :4], features[[0, 1, 2, 0, 1]])
    assert not passes.features_NTF[:, 4:].any()
    assert passes.lengths_N.tolist() == [4, 3, 2, 4, 3]
    passes.fill(features[:, :1].expand(3, 6, 2)[[0, 1, 2, 2, 1]], torch.full((5,), 6))
    assert passes.lengths_N.tolist() == [6] * 5


@pytest.mark.gpu
def test_after_a_failed_capture_the_device_draws_and_captures_as_before() -> None:
    stream = torch.cuda.Stream()

    def capture(graph: torch.cuda.CUDAGraph, pool: Any, out: torch.Tensor, *, fail: bool) -> None:
        with capturing(graph, pool, stream):
            out.copy_(torch.rand(3, device="cuda"))
            if fail:
                out.sum().item()  # waits for the device, which a capture refuses

    pool = torch.cuda.graph_pool_handle()
    out = torch.zeros(3, device="cuda")
    torch.cuda.manual_seed(7)
    expected = torch.rand(4, device="cuda"), torch.rand(3, device="cuda")
    torch.cuda.manual_seed(7)
    with pytest.raises(RuntimeError):
        capture(torch.cuda.CUDAGraph(), pool, out, fail=True)
    torch.testing.assert_close(torch.rand(4, device="cuda"), expected[0], rtol=0, atol=0)
    graph = torch.cuda.CUDAGraph()
    capture(graph, torch.cuda.graph_pool_handle(), out, fail=False)
    graph.replay()
    torch.testing.assert_close(out, expected[1], rtol=0, atol=0)
    # A capture that cannot begin, because of a pool whose graphs are gone, leaves no trace either.
    del graph
    with suppress(RuntimeError):
        capture(torch.cuda.CUDAGraph(), pool, out, fail=False)
    torch.rand(1, device="cuda")


@pytest.mark.gpu
def test_garbage_is_not_collected_during_a_capture() -> None:
    """A search or encoder that is garbage may hold a graph, which CUDA must not destroy then."""
    stream = torch.cuda.Stream()

    def captured(value: float) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph, out = torch.cuda.CUDAGraph(), torch.zeros(3, device="cuda")
        with capturing(graph, torch.cuda.graph_pool_handle(), stream):
            out.add_(value)
            kept = [[] for _ in range(10_000)]  # would start a collection
        assert len(kept) == 10_000
        return graph, out

    garbage: list[Any] = [captured(1.0)]
    garbage.append(garbage)
    del garbage
    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        graph, out = captured(2.0)
    finally:
        gc.set_threshold(*threshold)
    assert gc.isenabled()
    graph.replay()
    assert out.tolist() == [2.0] * 3


def test_numbers_are_read_where_they_are_written() -> None:
    recorder = Recorder(torch.device("cpu"))
    step = 0.0

    def numbers(first: float, count: int) -> Callable[[], Sequence[float]]:
        return lambda: [step + first + index for index in range(count)]

    counts = (1, 5, 4, 2, 1)
    recorder.start()
    places = [recorder.add(numbers(10.0 * index, n), n) for index, n in enumerate(counts)]
    assert [len(place) for place in places] == list(counts)
    assert all(place.data_ptr() % 16 == places[0].data_ptr() % 16 for place in places)
    for step in (100.0, 200.0):  # read by `numbers`
        recorder.refresh(recorder.program)
        for index, place in enumerate(places):
            assert place.tolist() == [step + 10 * index + k for k in range(len(place))]


def test_only_the_newest_pass_has_a_backward_pass() -> None:
    played: list[str] = []

    def passes() -> Any:
        encoded_NTE = torch.zeros(1, 2, 3)
        return SimpleNamespace(
            forward=SimpleNamespace(replay=lambda: played.append("forward")),
            backward=SimpleNamespace(replay=lambda: played.append("backward")),
            encoded_NTE=encoded_NTE,
            grad_NTE=torch.zeros_like(encoded_NTE),
        )

    graphs: Any = EncoderGraphs.__new__(EncoderGraphs)
    graphs._passes = 0
    graphs.gradients = SimpleNamespace(start_backward=lambda: None, tell_replay=lambda: None)
    anchor = torch.zeros((), requires_grad=True)
    oldest, newest = passes(), passes()
    first, second = (_Replay.apply(anchor, graphs, each, 1, 1) for each in (oldest, newest))
    with pytest.raises(RuntimeError, match=r"call backward\(\) after each batch"):
        first.sum().backward()
    assert second.shape == (1, 1, 3)  # of the two frames of the shape, those of the batch
    newest.grad_NTE.fill_(7.0)
    second.sum().backward()
    assert played == ["forward", "forward", "backward"]
    assert newest.grad_NTE.tolist() == [[[1.0] * 3, [0.0] * 3]]
