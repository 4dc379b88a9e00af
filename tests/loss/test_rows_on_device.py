"""The exact loss whose rows are packed on the device, against lengths on the host and float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt.ops.joiner import fused_joiner
from tests.loss.loss_cases import gradients, make_batch
from tests.loss.test_active_rows import OPTIONS, inputs, large_case, loss_of


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(41)


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.cpu().double() - exact.cpu().double()).norm() / exact.double().norm())


@pytest.mark.parametrize("rows_of_chunk", [1000, 37, 1])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_equals_lengths_on_the_host(
    options: Any, rows_of_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks begin within frames, and the last ones have no rows."""
    monkeypatch.setattr(fused_joiner, "uses_active_rows", lambda am, rows: False)
    batch = make_batch([9, 11, 4, 6], [4, 6, 0, 3], 13, options.blank)
    tensors = inputs(batch)
    # V' is 16, D is 16: 256 bytes a row of float64.
    monkeypatch.setattr(fused_joiner, "WORKSPACE_BYTES", 256 * rows_of_chunk)
    planned = []
    real = fused_joiner.joiner_loss
    monkeypatch.setattr(
        fused_joiner, "joiner_loss", lambda *args: planned.append(args[1]) or real(*args)
    )
    weights = torch.rand(batch.size, dtype=torch.float64) + 0.5
    losses, grads = [], []
    for on_host, is_counted in ((True, False), (True, True), (False, True)):
        monkeypatch.setattr(fused_joiner, "counts_rows", lambda *_, counted=is_counted: counted)
        # planned_joiner takes no active rows, though they may be left out.
        loss = loss_of(
            tensors,
            batch,
            options,
            skips_rows=True,
            is_active=False,
            lengths_on_host=on_host,
        )
        losses.append(loss)
        grads.append(gradients(loss, weights, *tensors))
    assert [plan.counts_rows for plan in planned] == [False, True, True]
    sizes = [end - begin for begin, end in pairwise(planned[2].chunk_offsets)]
    assert planned[2].rows == 4 * 11 * 7
    assert max(sizes) <= rows_of_chunk
    for loss, found in zip(losses[1:], grads[1:], strict=True):
        torch.testing.assert_close(loss, losses[0])
        for got, want in zip(found, grads[0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


CASES = {
    "ragged": ([700, 333, 1, 512], [60, 41, 0, 90], 61),
    "long": ([5200, 3000], [40, 25], 500),
}


@pytest.mark.gpu
@pytest.mark.parametrize("lengths_on", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "options",
    [{}, {"activation": "relu", "fastemit_lambda": 0.1}, {"hat": True}, {"clamp": 0.02}],
    ids=["plain", "relu, FastEmit", "HAT", "clamp"],
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_float32_on_cuda_is_as_precise_as_by_cublas(
    case: Any, options: dict[str, Any], lengths_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, targets, *lengths = large_case(*case)
    used: list[bool] = []
    real = fused_joiner.counts_rows

    def counts_rows(am: Tensor, rows: int) -> bool:
        used.append(real(am, rows))
        return used[-1]

    monkeypatch.setattr(fused_joiner, "counts_rows", counts_rows)
    # Several chunks, some without rows.
    monkeypatch.setattr(fused_joiner, "WORKSPACE_BYTES", 48 << 20)

    def losses_and_gradients(dtype: torch.dtype, on: str) -> tuple[Tensor, list[Tensor]]:
        leaves = [x.to("cuda", dtype).requires_grad_() for x in tensors]
        arguments = (targets.cuda(), None, *(x.to(on) for x in lengths))
        loss = pruned_rnnt.rnnt_loss_fused(*leaves, *arguments, reduction="none", **options)
        return loss.detach(), list(gradients(loss, torch.ones_like(loss), *leaves))

    loss, found = losses_and_gradients(torch.float32, lengths_on)
    again_loss, again = losses_and_gradients(torch.float32, lengths_on)
    assert used == [True, True]
    assert torch.equal(again_loss, loss)
    assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))
    monkeypatch.setattr(fused_joiner, "counts_rows", lambda am, rows: False)
    loss_by_cublas, by_cublas = losses_and_gradients(torch.float32, "cpu")
    exact_loss, exact = losses_and_gradients(torch.float64, "cpu")
    assert relative_error(loss, exact_loss) <= 2 * relative_error(loss_by_cublas, exact_loss) + 1e-7
    for name, got, other, want in zip(
        ("am", "lm", "weight", "bias"), found, by_cublas, exact, strict=True
    ):
        assert relative_error(got, want) <= 2 * relative_error(other, want) + 1e-6, name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_needs_no_wait_and_follows_the_lengths_in_a_graph(dtype: torch.dtype) -> None:
    tensors, targets, frames, symbols = large_case([600, 512, 333], [70, 80, 90], 100)
    leaves = [x.to(dtype).cuda().requires_grad_() for x in tensors]
    arguments = (targets.cuda(), None, frames.cuda(), symbols.cuda())

    def step() -> tuple[Tensor, ...]:
        loss = pruned_rnnt.rnnt_loss_fused(*leaves, *arguments, reduction="sum")
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    expected = step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    # Other lengths in the same graph.
    arguments[2].copy_(torch.tensor([100, 512, 599]))
    arguments[3].copy_(torch.tensor([90, 0, 33]))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, step(), strict=True))


@pytest.mark.gpu
def test_an_utterance_that_exceeds_the_padding_has_infinite_loss() -> None:
    tensors, targets, frames, symbols = large_case([700, 512, 333], [70, 80, 90], 100)
    leaves = [x.float().cuda().requires_grad_() for x in tensors]
    frames[2] = 701
    loss = pruned_rnnt.rnnt_loss_fused(
        *leaves, targets.cuda(), None, frames.cuda(), symbols.cuda(), reduction="none"
    )
    assert loss.isinf().tolist() == [False, False, True]
    am_gradient, *_ = torch.autograd.grad(loss[:2].sum(), leaves)
    assert not am_gradient[2].any()
    assert am_gradient[0].any()
