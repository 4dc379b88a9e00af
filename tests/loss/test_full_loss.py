"""rnnt_loss: padded and packed, every topology and option, against all paths one by one."""

import pytest
import torch

import pruned_rnnt
from tests.loss import loss_cases as cases


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(17)


@pytest.mark.parametrize("device", cases.DEVICES)
@cases.every_layout
@cases.every_form
@pytest.mark.parametrize("rnnt_type", cases.RNNT_TYPES)
@pytest.mark.parametrize(("blank", "delay_penalty"), [(0, 0.0), (3, 0.3), (4, -0.2)])
def test_value_and_gradient_are_those_of_all_paths(
    rnnt_type, form, packed, blank, delay_penalty, device
) -> None:
    batch = cases.every_small_batch(rnnt_type, blank)
    logits = cases.random_logits(batch)
    expected = cases.reference_losses(
        *cases.reference_rows(logits, batch, **form), batch, rnnt_type, delay_penalty
    )
    given = cases.pack(logits, batch) if packed else logits
    loss = pruned_rnnt.rnnt_loss(
        given.to(device),
        batch.targets.to(device),
        *batch.lengths(device),
        blank=blank,
        rnnt_type=rnnt_type,
        delay_penalty=delay_penalty,
        reduction="none",
        **form,
    )
    cases.assert_same_loss_and_gradients(loss, expected, batch.upstream(), logits)


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("rnnt_type", cases.RNNT_TYPES)
def test_larger_lattices_equal_the_plain_torch_twin(rnnt_type, device) -> None:
    batch = cases.make_batch([37, 41, 40], [11, 0, 36], 7, 0)
    logits = cases.random_logits(batch)
    rows = cases.reference_rows(logits, batch)
    expected = cases.reference_losses(*rows, batch, rnnt_type, total=cases.twin_total)
    loss = pruned_rnnt.rnnt_loss(
        logits.to(device),
        batch.targets.to(device),
        *batch.lengths(device),
        rnnt_type=rnnt_type,
        reduction="none",
    )
    cases.assert_same_loss_and_gradients(loss, expected, batch.upstream(), logits)


@pytest.mark.parametrize("device", cases.DEVICES)
@cases.tolerances(float64=1e-10, float32=2e-5, float16=2e-3, bfloat16=1e-2)
def test_dtypes(dtype, tolerance, device) -> None:
    """The loss is float32 or float64; the gradient has the dtype of the logits and its rounding."""
    batch = cases.make_batch([19, 23, 8], [6, 9, 3], 33, 0)
    rounded = cases.random_logits(batch).to(dtype)
    reference = rounded.detach().double().requires_grad_()
    rows = cases.reference_rows(reference, batch)
    expected = cases.reference_losses(*rows, batch, total=cases.twin_total)
    (expected_grad,) = cases.gradients(expected, batch.upstream(), reference)
    logits = rounded.detach().to(device).requires_grad_()
    loss = pruned_rnnt.rnnt_loss(
        logits, batch.targets.to(device), *batch.lengths(device), reduction="none"
    )
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad((loss * batch.upstream().to(loss)).sum(), logits)
    assert grad.dtype == dtype
    torch.testing.assert_close(grad.cpu().double(), expected_grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rnnt_type", cases.RNNT_TYPES)
@cases.every_form
def test_gradcheck(form, rnnt_type) -> None:
    batch = cases.make_batch([3, 4], [2, 1], 4, 1)
    logits = cases.random_logits(batch)

    def loss(x: torch.Tensor) -> torch.Tensor:
        lengths = batch.lengths("cpu")
        return pruned_rnnt.rnnt_loss(
            x, batch.targets, *lengths, blank=1, rnnt_type=rnnt_type, reduction="none", **form
        )

    assert torch.autograd.gradcheck(loss, logits, eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", cases.DEVICES)
def test_reductions_and_default_lengths(device) -> None:
    batch = cases.make_batch([5, 5, 5], [3, 3, 3], 6, 0)
    logits, targets = cases.random_logits(batch).to(device), batch.targets.to(device)
    losses = pruned_rnnt.rnnt_loss(logits, targets, reduction="none")
    for lengths_on in ("cpu", device):
        lengths = batch.lengths(lengths_on)
        full = pruned_rnnt.rnnt_loss(logits, targets, *lengths, reduction="none")
        assert torch.equal(losses, full)
    torch.testing.assert_close(pruned_rnnt.rnnt_loss(logits, targets), losses.mean())
    total = pruned_rnnt.rnnt_loss(logits, targets, reduction="sum")
    torch.testing.assert_close(total, losses.sum())


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("rnnt_type", cases.RNNT_TYPES)
def test_fastemit_scales_the_gradient_through_symbols(rnnt_type, device) -> None:
    """Loss unchanged; gradient that of emit scaled by 1 + f, here by a factor that has value 1."""
    batch = cases.every_small_batch(rnnt_type)
    logits = cases.random_logits(batch)
    emit, blank = cases.reference_rows(logits, batch)
    scaled = [px + 0.7 * (px - px.detach()).nan_to_num(nan=0.0) for px in emit]
    expected = cases.reference_losses(scaled, blank, batch, rnnt_type)
    (expected_grad,) = cases.gradients(expected, batch.upstream(), logits)
    arguments = (logits.to(device), batch.targets.to(device), *batch.lengths(device))
    plain, fast = (
        pruned_rnnt.rnnt_loss(*arguments, rnnt_type=rnnt_type, fastemit_lambda=f, reduction="none")
        for f in (0.0, 0.7)
    )
    assert torch.equal(plain, fast)
    torch.testing.assert_close(cases.gradients(fast, batch.upstream(), logits)[0], expected_grad)


@pytest.mark.parametrize("device", cases.DEVICES)
def test_clamp_acts_before_the_upstream_gradient(device) -> None:
    batch = cases.every_small_batch("regular")
    logits = cases.random_logits(batch)
    arguments = (logits.to(device), batch.targets.to(device), *batch.lengths(device))
    free, clamped = (
        pruned_rnnt.rnnt_loss(*arguments, clamp=clamp, reduction="none") for clamp in (None, 0.05)
    )
    (unit,) = cases.gradients(free, torch.ones(batch.size), logits)
    assert (unit.abs() > 0.05).any()
    expected = unit.clamp(-0.05, 0.05) * batch.upstream()[:, None, None, None]
    torch.testing.assert_close(cases.gradients(clamped, batch.upstream(), logits)[0], expected)


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_gradient_in_place(packed, device) -> None:
    batch = cases.make_batch([6, 4], [3, 2], 9, 0)
    logits = cases.random_logits(batch)
    given = (cases.pack(logits, batch) if packed else logits).detach().to(device)
    arguments = (batch.targets.to(device), *batch.lengths(device))
    apart, over = given.clone().requires_grad_(), given.clone().requires_grad_()
    pruned_rnnt.rnnt_loss(apart, *arguments).backward()
    loss = pruned_rnnt.rnnt_loss(over, *arguments, in_place=True)
    (grad,) = torch.autograd.grad(loss, over, retain_graph=True)
    assert grad.data_ptr() == over.data_ptr()
    assert torch.equal(grad, apart.grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, over)


@pytest.mark.parametrize("device", cases.DEVICES)
def test_padding_has_no_effect(device) -> None:
    batch = cases.make_batch([6, 4, 2], [3, 0, 2], 7, 0)
    logits = cases.random_logits(batch).detach()
    clean = logits.clone().to(device).requires_grad_()
    dirty, targets = logits.clone(), batch.targets.clone()
    for n, (frames, symbols) in enumerate(zip(batch.frames_N, batch.symbols_N, strict=True)):
        dirty[n, frames:] = float("nan")
        dirty[n, :, symbols + 1 :] = float("inf")
        targets[n, symbols:] = 10**6
    dirty = dirty.to(device).requires_grad_()
    for given, y in ((clean, batch.targets), (dirty, targets)):
        lengths = batch.lengths(device)
        pruned_rnnt.rnnt_loss(given, y.to(device), *lengths, reduction="sum").backward()
    assert torch.equal(dirty.grad, clean.grad)
    for n, (frames, symbols) in enumerate(zip(batch.frames_N, batch.symbols_N, strict=True)):
        assert not dirty.grad[n, frames:].any()
        assert not dirty.grad[n, :, symbols + 1 :].any()


@pytest.mark.parametrize("device", cases.DEVICES)
def test_nan_stays_in_its_utterance(device) -> None:
    batch = cases.make_batch([5, 5, 5], [2, 2, 2], 6, 0)
    logits = cases.random_logits(batch).detach()
    clean = logits.clone().to(device).requires_grad_()
    logits[1, 2, 1, 3] = float("nan")
    dirty = logits.to(device).requires_grad_()
    arguments = (batch.targets.to(device), *batch.lengths(device))
    losses = [pruned_rnnt.rnnt_loss(x, *arguments, reduction="none") for x in (clean, dirty)]
    for loss in losses:
        loss.sum().backward()
    assert losses[1][1].isnan()
    for n in (0, 2):
        assert torch.equal(losses[0][n], losses[1][n])
        assert torch.equal(clean.grad[n], dirty.grad[n])


@pytest.mark.parametrize("device", cases.DEVICES)
def test_log_probs_of_minus_infinity(device) -> None:
    """An impossible arc has no gradient and no NaN."""
    batch = cases.make_batch([3], [2], 4, 0)
    log_probs = cases.random_logits(batch).detach().log_softmax(-1)
    log_probs[0, 0, 0, batch.targets[0, 0]] = -torch.inf
    log_probs.requires_grad_()
    rows = cases.reference_rows(log_probs, batch, from_log_probs=True)
    expected = cases.reference_losses(*rows, batch)
    loss = pruned_rnnt.rnnt_loss(
        log_probs.to(device), batch.targets.to(device), from_log_probs=True, reduction="none"
    )
    torch.testing.assert_close(loss.cpu(), expected)
    (grad,) = cases.gradients(loss, torch.ones(1), log_probs)
    torch.testing.assert_close(grad, cases.gradients(expected, torch.ones(1), log_probs)[0])
    assert grad[0, 0, 0, batch.targets[0, 0]] == 0


@pytest.mark.parametrize("device", cases.DEVICES)
def test_non_contiguous_inputs(device) -> None:
    batch = cases.make_batch([6, 4], [3, 2], 7, 0)
    batch = batch._replace(targets=batch.targets.to(device))
    logits = cases.random_logits(batch).detach().to(device)
    turned = logits.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0).requires_grad_()
    straight = logits.clone().requires_grad_()
    wide = torch.stack([batch.targets, batch.targets], dim=2)[:, :, 0]
    assert not turned.is_contiguous()
    assert not wide.is_contiguous()
    frames, symbols = batch.lengths(device)
    for x, y, t in (
        (turned, wide, torch.stack([frames, frames], 1)[:, 0]),
        (straight, batch.targets, frames),
    ):
        pruned_rnnt.rnnt_loss(x, y, t, symbols).backward()
    assert torch.equal(turned.grad, straight.grad)


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("offset", [1e3, -1e4, 1e6])
def test_a_large_common_offset(offset, device) -> None:
    """Each of T + U log-probabilities errs by 1.2e-7 of the largest logit at most, without it by
    rounding alone."""
    batch = cases.make_batch([6], [3], 5, 0)
    logits = (torch.randn(1, 6, 4, 5) + offset).to(device)
    targets = batch.targets.to(device)
    exact = pruned_rnnt.rnnt_loss(logits.double(), targets).float()
    bound = 9 * 1.2e-7 * float(logits.abs().max())
    torch.testing.assert_close(
        pruned_rnnt.rnnt_loss(logits, targets), exact, rtol=0, atol=bound + 1e-5
    )
    shifted = logits - logits.amax(-1, keepdim=True)
    torch.testing.assert_close(pruned_rnnt.rnnt_loss(shifted, targets), exact, rtol=0, atol=1e-5)
    given = pruned_rnnt.rnnt_loss(logits.log_softmax(-1), targets, from_log_probs=True)
    torch.testing.assert_close(given, exact, rtol=0, atol=1e-5)
    am, lm = logits[:, :, 0], logits[:, 0]
    exact = pruned_rnnt.rnnt_loss_simple(am.double(), lm.double(), targets).loss.float()
    loss = pruned_rnnt.rnnt_loss_simple(am, lm, targets).loss
    torch.testing.assert_close(loss, exact, rtol=0, atol=2 * bound + 1e-5)
    shifted_am, shifted_lm = (x - x.amax(-1, keepdim=True) for x in (am, lm))
    loss = pruned_rnnt.rnnt_loss_simple(shifted_am, shifted_lm, targets).loss
    torch.testing.assert_close(loss, exact, rtol=0, atol=1e-5)
