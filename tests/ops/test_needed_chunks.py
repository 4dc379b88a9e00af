"""Chunks of a number of rows that the host may not know."""

import pytest
import torch

from pruned_rnnt.host_copy import HostCopy
from pruned_rnnt.ops.common.needed_chunks import needed_chunks


@pytest.mark.parametrize(("total", "expected"), [(0, 1), (1, 1), (10, 1), (11, 2), (99, 4)])
def test_chunks_behind_a_known_total_are_left_out(total: int, expected: int) -> None:
    assert list(needed_chunks(torch.tensor(total), 10, 4)) == list(range(expected))


def test_all_chunks_come_until_the_total_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    arrives = iter([False, False])
    monkeypatch.setattr(HostCopy, "arrived", lambda _: next(arrives, True))
    assert list(needed_chunks(torch.tensor(25), 10, 9)) == [0, 1, 2]
    arrives = iter([False] * 9)
    assert list(needed_chunks(torch.tensor(25), 10, 9)) == list(range(9))


@pytest.mark.gpu
def test_nothing_waits_and_graphs_compute_all_chunks() -> None:
    total = torch.tensor(11, dtype=torch.int32, device="cuda")
    # The first call allocates pinned memory, which may wait.
    assert list(needed_chunks(total, 10, 4))[:2] == [0, 1]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        # Work that keeps the device busy until the host has asked.
        torch.cuda._sleep(200_000_000)
        assert list(needed_chunks(total, 10, 4)) == [0, 1, 2, 3]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    chunks = needed_chunks(total, 10, 4)
    first = next(chunks)
    torch.cuda.synchronize()
    assert [first, *chunks] == [0, 1]
    graph, result = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        for chunk in needed_chunks(total, 10, 4):
            result[chunk] += 1
    graph.replay()
    assert result.tolist() == [1, 1, 1, 1]
