"""-inf in the inputs: masked symbols have no effect, and cause no NaN. +inf does."""

import itertools

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from tests.loss.loss_cases import DEVICES, gradients, make_batch

SCALES = [(0.0, 0.0), (0.25, 0.0), (0.0, 0.3), (0.2, 0.4), (0.6, 0.4)]
MASKED = 4


def simple_inputs(vocabulary: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(3, 6, vocabulary).double(), torch.randn(3, 4, vocabulary).double()


def simple_losses(am: Tensor, lm: Tensor, batch, scales: tuple[float, float]) -> Tensor:
    return pruned_rnnt.rnnt_loss_simple(
        am,
        lm,
        batch.targets.to(am.device),
        *batch.lengths(am.device),
        lm_only_scale=scales[0],
        am_only_scale=scales[1],
        reduction="none",
    ).loss


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("masked", "scales"),
    # If the symbol is masked in am alone, the predictor's part still contains it.
    [("am", SCALES[0]), *itertools.product(["lm", "both"], SCALES)],
)
def test_simple_loss_with_a_masked_symbol(masked, scales, dtype, device) -> None:
    """Equals the loss of a vocabulary without the symbol."""
    batch = make_batch([6, 4, 5], [3, 2, 0], MASKED, 0)
    am, lm = simple_inputs(MASKED + 1)
    if masked in ("am", "both"):
        am[:, :, MASKED] = -torch.inf
    if masked in ("lm", "both"):
        lm[:, :, MASKED] = -torch.inf
    leaves = [x.to(device, dtype).requires_grad_() for x in (am, lm)]
    without = [x[..., :MASKED].clone().requires_grad_() for x in (am, lm)]
    loss = simple_losses(*leaves, batch, scales)
    expected = simple_losses(*without, batch, scales)
    precision = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {}
    torch.testing.assert_close(loss.cpu().double(), expected, **precision)
    weights = torch.tensor([1.0, 2.0, -0.5])
    got = gradients(loss, weights, *leaves)
    for grad, wanted in zip(got, gradients(expected, weights, *without), strict=True):
        torch.testing.assert_close(grad[..., :MASKED], wanted, **precision)
        assert not grad[..., MASKED].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("side", ["am", "lm"])
@pytest.mark.parametrize("scales", SCALES)
def test_simple_loss_with_a_fully_masked_row(scales, side, device) -> None:
    """Utterance 1 has no path: its loss is infinite, without gradient, and others do not change."""
    batch = make_batch([6, 4, 5], [3, 2, 0], 5, 0)
    am, lm = simple_inputs(5)
    losses, grads = [], []
    for empty in (False, True):
        if empty:
            (am if side == "am" else lm)[1, 2] = -torch.inf
        leaves = [x.clone().to(device).requires_grad_() for x in (am, lm)]
        losses.append(simple_losses(*leaves, batch, scales))
        grads.append(gradients(losses[-1], torch.tensor([1.0, 0.0, 2.0]), *leaves))
    assert losses[1][1] == torch.inf
    weights = torch.tensor([1.0, 3.0, 2.0])
    for grad in gradients(losses[1], weights, *leaves):
        assert grad.isfinite().all()
        # The predictor's prior couples an utterance to the losses of the others.
        assert scales[1] != 0 or not grad[1].any()
    if scales[1] == 0:
        torch.testing.assert_close(losses[1][[0, 2]], losses[0][[0, 2]])
        for before, after in zip(*grads, strict=True):
            torch.testing.assert_close(before[[0, 2]], after[[0, 2]])


@pytest.mark.parametrize("device", DEVICES)
def test_ctc_with_masked_symbols(device) -> None:
    torch.manual_seed(4)
    batch = make_batch([9, 7, 8], [3, 2, 4], 5, 0)
    logits = torch.randn(3, 9, 7, dtype=torch.float64)
    logits[..., 5:] = -torch.inf
    leaf = logits.to(device).requires_grad_()
    without = logits[..., :5].clone().requires_grad_()
    targets, lengths = batch.targets.to(device), batch.lengths(device)
    loss = pruned_rnnt.ctc_loss(leaf, targets, *lengths, reduction="none")
    expected = pruned_rnnt.ctc_loss(without, batch.targets, *batch.lengths("cpu"), reduction="none")
    torch.testing.assert_close(loss.cpu(), expected)
    (grad,) = gradients(loss, batch.upstream(), leaf)
    (wanted,) = gradients(expected, batch.upstream(), without)
    torch.testing.assert_close(grad[..., :5], wanted)
    assert not grad[..., 5:].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("spoil", ["target", "row", "padding"])
def test_ctc_without_a_path_and_with_padding(spoil, dtype, device) -> None:
    torch.manual_seed(4)
    batch = make_batch([9, 7, 8], [3, 2, 4], 5, 0)
    logits = torch.randn(3, 9, 5, dtype=dtype)
    given = logits.clone()
    if spoil == "target":
        given[1, :, batch.targets[1, 0]] = -torch.inf
    elif spoil == "row":
        given[1, 3] = -torch.inf
    else:
        given[1, 7:] = torch.nan
        given[2, 8] = torch.inf
    leaf = given.to(device).requires_grad_()
    targets, lengths = batch.targets.to(device), batch.lengths(device)
    loss = pruned_rnnt.ctc_loss(leaf, targets, *lengths, reduction="none")
    clean = logits.clone().to(device).requires_grad_()
    expected = pruned_rnnt.ctc_loss(clean, targets, *lengths, reduction="none")
    (grad,) = gradients(loss, batch.upstream() + 2, leaf)
    (wanted,) = gradients(expected, batch.upstream() + 2, clean)
    kept = [0, 1, 2] if spoil == "padding" else [0, 2]
    torch.testing.assert_close(loss[kept], expected[kept])
    torch.testing.assert_close(grad[kept], wanted[kept])
    if spoil != "padding":
        assert loss[1] == 0
        assert not grad[1].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("loss", ["logits", "hat", "simple"])
def test_an_overflow_is_nan_although_a_path_avoids_it(loss, dtype, device) -> None:
    """As with torch.log_softmax, so that a guard against overflow sees it."""
    lengths = [torch.tensor(each).to(device) for each in ([3, 2], [1, 1])]
    targets = torch.tensor([[1], [2]]).to(device)
    x = torch.zeros(2, 3, 2, 5)
    x[1, 1, 0, 4] = torch.inf
    if loss == "simple":
        x = x[:, :, 0]
    leaf = x.to(device, dtype).requires_grad_()
    if loss == "simple":
        lm = torch.zeros(2, 2, 5, device=device, dtype=dtype)
        result = pruned_rnnt.rnnt_loss_simple(leaf, lm, targets, *lengths, reduction="none").loss
    else:
        result = pruned_rnnt.rnnt_loss(leaf, targets, *lengths, reduction="none", hat=loss == "hat")
    assert result.isnan().tolist() == [False, True]
    result.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad[0].isfinite().all()
    assert not leaf.grad[1].isfinite().all()
