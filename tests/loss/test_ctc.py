"""ctc_loss: warp-ctc's contract over torch's implementation. ctc_consistency_loss: value, gradients
and padding.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from tests.loss import bad_input_calls as calls
from tests.loss.bad_input_calls import SPOILT
from tests.loss.loss_cases import DEVICES, gradients, make_batch


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("blank", [0, 3, 5])
def test_equals_torch_and_infeasible_utterances_cost_nothing(blank, device) -> None:
    torch.manual_seed(2)
    # The third has fewer frames than symbols, the fourth no symbols.
    batch = make_batch([9, 7, 2, 5], [4, 3, 4, 0], 6, blank)
    logits = (3 * torch.randn(4, 9, 6, dtype=torch.float64)).to(device).requires_grad_()
    targets = batch.targets.clone()
    targets[3] = -7  # padding may have any values
    lengths = batch.lengths(device)
    loss = pruned_rnnt.ctc_loss(logits, targets.to(device), *lengths, blank=blank, reduction="none")
    expected = torch.nn.functional.ctc_loss(
        logits.log_softmax(-1).transpose(0, 1),
        batch.targets.to(device),
        *lengths,
        blank=blank,
        reduction="none",
        zero_infinity=True,
    )
    assert loss[2] == 0
    torch.testing.assert_close(loss, expected)
    (grad,) = gradients(loss, batch.upstream(), logits)
    assert not grad[2].any()
    torch.testing.assert_close(grad, gradients(expected, batch.upstream(), logits)[0])


@pytest.mark.parametrize("device", DEVICES)
def test_log_probs_and_activations_give_the_same(device) -> None:
    logits = torch.randn(2, 8, 5).to(device)
    targets = torch.tensor([[1, 2, 2], [4, 3, 1]], device=device)
    losses = [
        pruned_rnnt.ctc_loss(x, targets, reduction="sum")
        for x in (logits, logits.log_softmax(-1), logits + 7)
    ]
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(losses[2], losses[0])


@pytest.mark.parametrize("device", DEVICES)
def test_no_gradient_is_computed_for_logits_that_need_none(device) -> None:
    logits = torch.randn(2, 8, 5).to(device)
    targets = torch.tensor([[1, 2, 2], [4, 3, 1]], device=device)
    losses = []
    for needed in (True, False):
        with torch.profiler.profile() as profile:
            losses.append(pruned_rnnt.ctc_loss(logits.clone().requires_grad_(needed), targets))
        ops = {event.name for event in profile.events()}
        assert ("aten::_ctc_loss_backward" in ops) == needed
    assert torch.equal(*losses)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes(dtype, device) -> None:
    logits = torch.randn(2, 8, 5).to(device, dtype).requires_grad_()
    targets = torch.tensor([[1, 2, 2], [4, 3, 1]], device=device)
    loss = pruned_rnnt.ctc_loss(logits, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, pruned_rnnt.ctc_loss(logits.float(), targets))
    loss.backward()
    assert logits.grad.dtype == dtype


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "value"), SPOILT)
def test_values_that_are_not_read(name, value, device) -> None:
    losses, grads = [], []
    # On the CPU, values are not read in torch.compile.
    compiled = torch.compile(pruned_rnnt.ctc_loss, backend="eager")
    loss_of = compiled if device == "cpu" else pruned_rnnt.ctc_loss
    for spoilt in (calls.arguments(), calls.changed(name, value)):
        given = {key: x.to(device) for key, x in spoilt.items()}
        logits = given["am"].requires_grad_()
        batch = (given["targets"], given["logit_lengths"], given["target_lengths"])
        losses.append(loss_of(logits, *batch, reduction="none"))
        grads.append(torch.autograd.grad(losses[-1].sum(), logits)[0])
    assert losses[1][1] == torch.inf
    assert not grads[1][1].any()
    others = [0, 2]
    torch.testing.assert_close(losses[1][others], losses[0][others])
    torch.testing.assert_close(grads[1][others], grads[0][others])


def by_definition(logits: Tensor, other: Tensor, lengths: list[int]) -> Tensor:
    """1/2 sum over frames of KL(sg(other) || ours) + KL(sg(ours) || other), by torch's kl_div."""
    losses = []
    for ours_TV, theirs_TV, frames in zip(logits, other, lengths, strict=True):
        ours, theirs = (x[:frames].log_softmax(1) for x in (ours_TV, theirs_TV))
        one, two = (
            torch.nn.functional.kl_div(x, y.detach(), reduction="sum", log_target=True)
            for x, y in ((ours, theirs), (theirs, ours))
        )
        losses.append((one + two) / 2)
    return torch.stack(losses)


@pytest.mark.parametrize("device", DEVICES)
def test_values_and_gradients_of_ragged_batches(device: str) -> None:
    generator = torch.Generator().manual_seed(3)
    shape, lengths = (4, 9, 6), [9, 4, 1, 0]
    leaves = [
        (3 * torch.randn(shape, generator=generator, dtype=torch.float64))
        .to(device)
        .requires_grad_()
        for _ in range(2)
    ]
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64, device=device)
    expected = by_definition(leaves[0], leaves[1], lengths)
    grads = torch.autograd.grad((expected * weights).sum(), leaves)
    for lengths_N in (torch.tensor(lengths), torch.tensor(lengths, device=device)):
        found = pruned_rnnt.ctc_consistency_loss(*leaves, lengths_N, reduction="none")
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        found_grads = torch.autograd.grad((found * weights).sum(), leaves)
        for grad, wanted in zip(found_grads, grads, strict=True):
            torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-12)
    every_frame = pruned_rnnt.ctc_consistency_loss(*leaves, reduction="mean")
    torch.testing.assert_close(every_frame, by_definition(*leaves, [9] * 4).mean())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30])
def test_padding_contributes_nothing(value: float) -> None:
    torch.manual_seed(0)
    logits, other = torch.randn(2, 2, 7, 5)
    lengths = torch.tensor([7, 3])
    expected = pruned_rnnt.ctc_consistency_loss(logits, other, lengths, reduction="none")
    broken, other_broken = logits.clone(), other.clone()
    broken[1, 3:], other_broken[1, 3:] = value, -value
    leaves = broken.requires_grad_(), other_broken.requires_grad_()
    found = pruned_rnnt.ctc_consistency_loss(*leaves, lengths, reduction="none")
    assert torch.equal(found, expected)
    found.sum().backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert not leaf.grad[1, 3:].any()
        assert leaf.grad[1, :3].any()


def test_equal_views_cost_nothing_and_symbols_without_probability_are_no_difference() -> None:
    logits = torch.randn(1, 4, 6)
    assert pruned_rnnt.ctc_consistency_loss(logits, logits + 5).item() == pytest.approx(0, abs=1e-5)
    ruled_out, other = torch.randn(2, 1, 4, 6)
    ruled_out[:, :, 2] = other[:, :, 2] = -torch.inf
    kept = [0, 1, 3, 4, 5]
    torch.testing.assert_close(
        pruned_rnnt.ctc_consistency_loss(ruled_out, other),
        pruned_rnnt.ctc_consistency_loss(ruled_out[:, :, kept], other[:, :, kept]),
    )


@pytest.mark.parametrize("device", DEVICES)
def test_precision_of_five_thousand_frames(device: str) -> None:
    """Views are almost equal, as in training: differences of large logits must not drown."""
    generator = torch.Generator().manual_seed(1)
    logits = 8 * torch.randn(1, 5000, 50, generator=generator, dtype=torch.float64)
    other = logits + 0.01 * torch.randn(1, 5000, 50, generator=generator, dtype=torch.float64) + 30
    exact = by_definition(logits, other, [5000])
    leaves = [x.to(device, torch.float32).requires_grad_() for x in (logits, other)]
    wanted = by_definition(*(x.detach().double() for x in leaves), [5000])
    found = pruned_rnnt.ctc_consistency_loss(*leaves)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-4)
    assert found.item() == pytest.approx(exact.item(), rel=2e-3)
    found.backward()
    (reference,) = torch.autograd.grad(
        by_definition(doubled := leaves[0].detach().double().requires_grad_(), leaves[1], [5000]),
        doubled,
    )
    error = (leaves[0].grad.double() - reference).norm() / reference.norm()
    assert error < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes_of_ctc_consistency(dtype: torch.dtype) -> None:
    logits, other = (x.to(dtype).requires_grad_() for x in torch.randn(2, 2, 8, 5))
    loss = pruned_rnnt.ctc_consistency_loss(logits, other)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, by_definition(logits.float(), other.float(), [8, 8]).mean())
    loss.backward()
    assert logits.grad.dtype == other.grad.dtype == dtype


def test_second_derivatives_are_refused() -> None:
    logits, other = (x.requires_grad_() for x in torch.randn(2, 1, 3, 4))
    loss = pruned_rnnt.ctc_consistency_loss(logits, other)
    (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        grad.square().sum().backward()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(1, 2, 3), torch.zeros(1, 3, 3)), "other_logits has shape"),
        ((torch.zeros(2, 3), torch.zeros(2, 3)), r"logits has shape \(2, 3\)"),
        ((torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), torch.ones(2).long()), "logit_lengths"),
        ((torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), torch.ones(1)), "logit_lengths is"),
    ],
)
def test_bad_input_is_named(arguments: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pruned_rnnt.ctc_consistency_loss(*arguments)


@pytest.mark.gpu
def test_the_host_does_not_wait_for_the_device() -> None:
    logits, other = (x.requires_grad_() for x in torch.randn(2, 3, 50, 9, device="cuda"))
    lengths = torch.tensor([50, 20, 1])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pruned_rnnt.ctc_consistency_loss(logits, other, lengths, reduction="sum").backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
