"""The gradient of log-probabilities, which two elements of a row have and which reads none.

Axes: N batch, T frames, U symbols, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from tests.loss import loss_cases as cases

every_vocabulary = pytest.mark.parametrize("vocabulary", [2, 28, 57, 300, 1001, 5000])
every_type = pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)],
    ids=str,
)


@pytest.fixture(autouse=True)
def _new_memory_is_nan() -> Iterator[None]:
    """An element that is not written, or computed from one that is not, is NaN."""
    torch.manual_seed(2)
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")


def log_probs_of(batch: cases.Batch, dtype: torch.dtype) -> Tensor:
    return cases.random_logits(batch).detach().log_softmax(-1).to(dtype)


def expected(log_probs: Tensor, batch: cases.Batch, upstream: Tensor, clamp: float) -> Tensor:
    """The gradient by automatic differentiation, in float64; clamped before upstream."""
    wide = log_probs.double().requires_grad_()
    losses = cases.reference_losses(
        *cases.reference_rows(wide, batch, from_log_probs=True), batch, total=cases.twin_total
    )
    (unit,) = torch.autograd.grad(losses.sum(), wide)
    return unit.clamp(-clamp, clamp) * upstream[:, None, None, None]


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("is_last", [False, True])
@every_type
@every_vocabulary
def test_gradient(vocabulary, dtype, tolerance, is_last, in_place, device) -> None:
    blank = vocabulary - 1 if is_last else 0
    batch = cases.make_batch([7, 5, 2], [3, 4, 0], vocabulary, blank)
    log_probs = log_probs_of(batch, dtype)
    upstream, clamp = batch.upstream(), 0.75
    wanted = expected(log_probs, batch, upstream, clamp)
    leaf = log_probs.to(device).requires_grad_()
    # Of a leaf, nothing may be overwritten.
    given = leaf.clone()
    options = {"blank": blank, "clamp": clamp, "from_log_probs": True, "in_place": in_place}
    loss = pruned_rnnt.rnnt_loss(
        given, batch.targets.to(device), *batch.lengths(device), reduction="none", **options
    )
    if not in_place:
        # Neither an error nor another gradient: the values are not needed any more.
        given.detach().fill_(torch.nan)
    (grad,) = torch.autograd.grad((loss * upstream.to(loss)).sum(), leaf)
    assert grad.dtype == dtype
    torch.testing.assert_close(grad.cpu().double(), wanted, rtol=tolerance, atol=tolerance)
    assert not grad.cpu()[wanted == 0].any()


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(("frames_N", "symbols_N"), [([6], [3]), ([6, 3], [3, 1])])
def test_reductions(frames_N, symbols_N, reduction, device) -> None:
    batch = cases.make_batch(frames_N, symbols_N, 300, 0)
    log_probs = log_probs_of(batch, torch.float64)
    upstream = batch.upstream() if reduction == "none" else torch.tensor(0.75)
    leaf = log_probs.to(device).requires_grad_()
    arguments = (batch.targets.to(device), *batch.lengths(device))
    losses = pruned_rnnt.rnnt_loss(leaf, *arguments, from_log_probs=True, reduction="none")
    loss = pruned_rnnt.rnnt_loss(leaf, *arguments, from_log_probs=True, reduction=reduction)
    wanted = losses if reduction == "none" else getattr(losses, reduction)()
    torch.testing.assert_close(loss, wanted)
    (grad,) = torch.autograd.grad(loss, leaf, upstream.to(loss))
    shares = upstream.double().expand(batch.size) / (batch.size if reduction == "mean" else 1)
    torch.testing.assert_close(grad.cpu(), expected(log_probs, batch, shares, 1e9))


@pytest.mark.parametrize("device", cases.DEVICES)
@every_vocabulary
def test_packed_rows(vocabulary, device) -> None:
    batch = cases.make_batch([7, 5, 2], [3, 4, 0], vocabulary, 0)
    log_probs = log_probs_of(batch, torch.float64)
    wanted = expected(log_probs, batch, batch.upstream(), 1e9)
    leaf = cases.pack(log_probs, batch).to(device).requires_grad_()
    loss = pruned_rnnt.rnnt_loss(
        leaf,
        batch.targets.to(device),
        *batch.lengths(device),
        from_log_probs=True,
        reduction="none",
    )
    (grad,) = torch.autograd.grad((loss * batch.upstream().to(loss)).sum(), leaf)
    torch.testing.assert_close(grad.cpu(), cases.pack(wanted, batch))


@pytest.mark.parametrize("device", cases.DEVICES)
def test_graph_can_be_kept(device) -> None:
    batch = cases.make_batch([6, 3], [3, 1], 300, 0)
    leaf = log_probs_of(batch, torch.float32).to(device).requires_grad_()
    loss = pruned_rnnt.rnnt_loss(leaf, batch.targets.to(device), from_log_probs=True)
    first, second = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()
