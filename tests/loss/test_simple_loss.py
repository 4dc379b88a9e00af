"""rnnt_loss_simple against its 4-D logits, in float64, at any range of am and lm."""

import itertools

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from tests.loss import loss_cases as cases

SCALES = [(0.0, 0.0), (0.25, 0.0), (0.0, 0.3), (0.2, 0.4), (0.5, 0.5)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


def inputs(batch, dtype=torch.float64) -> tuple[Tensor, Tensor]:
    am = torch.randn(batch.size, batch.frames, batch.vocabulary, dtype=dtype)
    lm = torch.randn(batch.size, batch.symbols + 1, batch.vocabulary, dtype=dtype)
    return am.requires_grad_(), lm.requires_grad_()


def smoothed_rows(am: Tensor, lm: Tensor, batch, lm_scale: float, am_scale: float):
    """emit, blank rows of each utterance by the definition, differentiable."""
    combined = (am[:, :, None] + lm[:, None]).log_softmax(-1)
    lm_only = lm.log_softmax(-1)
    real = torch.cat([lm_only[n, : u + 1] for n, u in enumerate(batch.symbols_N)])
    log_q = real.logsumexp(0) - torch.tensor(float(len(real))).log()
    am_only = (am + log_q).log_softmax(-1)
    mixed = (
        (1 - lm_scale - am_scale) * combined
        + lm_scale * lm_only[:, None]
        + am_scale * am_only[:, :, None]
    )
    emit, blank = [], []
    for n, symbols in enumerate(batch.symbols_N):
        columns = [mixed[n, :, u, batch.targets[n, u]] for u in range(symbols)]
        columns.append(torch.full_like(mixed[n, :, 0, 0], -torch.inf))
        emit.append(torch.stack(columns, 1))
        blank.append(mixed[n, :, : symbols + 1, batch.blank])
    return emit, blank


def derivatives(total: Tensor, rows: Tensor) -> Tensor:
    """Zeros for rows that total does not depend on."""
    if not rows.requires_grad:
        return torch.zeros_like(rows)
    (grad,) = torch.autograd.grad(total, rows, retain_graph=True, allow_unused=True)
    return torch.zeros_like(rows) if grad is None else grad


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize(("lm_scale", "am_scale"), SCALES)
@pytest.mark.parametrize("rnnt_type", cases.RNNT_TYPES)
@pytest.mark.parametrize(("blank", "delay_penalty"), [(0, 0.0), (4, 0.4)])
def test_value_and_gradient(rnnt_type, lm_scale, am_scale, blank, delay_penalty, device) -> None:
    batch = cases.every_small_batch(rnnt_type, blank)
    am, lm = inputs(batch)
    rows = smoothed_rows(am, lm, batch, lm_scale, am_scale)
    expected = cases.reference_losses(*rows, batch, rnnt_type, delay_penalty)
    expected_grads = cases.gradients(expected, batch.upstream(), am, lm)
    loss, occupancy = pruned_rnnt.rnnt_loss_simple(
        am.to(device),
        lm.to(device),
        batch.targets.to(device),
        *batch.lengths(device),
        blank=blank,
        lm_only_scale=lm_scale,
        am_only_scale=am_scale,
        rnnt_type=rnnt_type,
        delay_penalty=delay_penalty,
        reduction="none",
    )
    torch.testing.assert_close(loss.cpu(), expected)
    for grad, wanted in zip(
        cases.gradients(loss, batch.upstream(), am, lm), expected_grads, strict=True
    ):
        torch.testing.assert_close(grad, wanted)
    # Occupancies are the derivatives by the rows.
    for n, (px, py) in enumerate(zip(*rows, strict=True)):
        one = expected[n]
        gx, gy = derivatives(-one, px), derivatives(-one, py)
        width = px.shape[1]
        torch.testing.assert_close(occupancy.emit[n, :, :width].cpu(), gx)
        torch.testing.assert_close(occupancy.blank[n, :, :width].cpu(), gy)
        assert not occupancy.emit[n, :, width - 1 :].any()
        assert not occupancy.blank[n, :, width:].any()
    assert not occupancy.emit.requires_grad


# Distance between the peaks of am and lm; from 80 on products of float32 exponentials underflow.
@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("lm_scale", "am_scale"), [(0.0, 0.0), (0.25, 0.0), (0.2, 0.1)])
@pytest.mark.parametrize("distance", [0, 50, 80, 90, 120, 1000, 10_000])
def test_normaliser_is_right_at_any_range(distance, lm_scale, am_scale, dtype, device) -> None:
    batch = cases.make_batch([9, 7], [4, 3], 30, 0)
    am, lm = inputs(batch)
    with torch.no_grad():
        am[:, :, 7] += distance
        lm[:, :, 11] += distance
        # Some frames and symbols keep their products above underflow, others do not.
        am[:, ::3, 7] -= distance
        lm[:, ::2, 11] -= distance / 2
    am, lm = (x.detach().to(dtype).double().requires_grad_() for x in (am, lm))
    rows = smoothed_rows(am, lm, batch, lm_scale, am_scale)
    expected = cases.reference_losses(*rows, batch, total=cases.twin_total)
    expected_grads = cases.gradients(expected, batch.upstream(), am, lm)
    given = [x.detach().to(device, dtype).requires_grad_() for x in (am, lm)]
    loss, _ = pruned_rnnt.rnnt_loss_simple(
        *given,
        batch.targets.to(device),
        *batch.lengths(device),
        lm_only_scale=lm_scale,
        am_only_scale=am_scale,
        reduction="none",
    )
    # The resolution of alpha, which is as large as the loss: 0.01 for peaks 1e4 apart in float32.
    resolution = torch.finfo(dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=0, atol=8 * resolution)
    for grad, wanted in zip(
        cases.gradients(loss, batch.upstream(), *given), expected_grads, strict=True
    ):
        torch.testing.assert_close(grad, wanted, rtol=0, atol=16 * resolution)


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-5), (torch.float16, 4e-3), (torch.bfloat16, 2e-2)],
    ids=str,
)
@pytest.mark.parametrize(("lm_scale", "am_scale"), [(0.25, 0.0), (0.2, 0.3)])
def test_dtypes(lm_scale, am_scale, dtype, tolerance, device) -> None:
    batch = cases.make_batch([19, 23, 8], [6, 9, 3], 33, 0)
    am, lm = (x.detach().to(dtype) for x in inputs(batch))
    wide = [x.double().requires_grad_() for x in (am, lm)]
    rows = smoothed_rows(*wide, batch, lm_scale, am_scale)
    expected = cases.reference_losses(*rows, batch, total=cases.twin_total)
    expected_grads = cases.gradients(expected, batch.upstream(), *wide)
    given = [x.to(device).requires_grad_() for x in (am, lm)]
    loss, occupancy = pruned_rnnt.rnnt_loss_simple(
        *given,
        batch.targets.to(device),
        *batch.lengths(device),
        lm_only_scale=lm_scale,
        am_only_scale=am_scale,
        reduction="none",
    )
    assert loss.dtype == occupancy.emit.dtype == torch.float32
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=2e-5, atol=2e-5)
    total = (loss * batch.upstream().to(loss)).sum()
    for grad, wanted in zip(torch.autograd.grad(total, given), expected_grads, strict=True):
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.cpu().double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("lm_scale", "am_scale"), [(0.0, 0.0), (0.25, 0.25)])
def test_gradcheck(lm_scale, am_scale) -> None:
    batch = cases.make_batch([3, 4], [2, 1], 4, 0)

    def loss(am: Tensor, lm: Tensor) -> Tensor:
        return pruned_rnnt.rnnt_loss_simple(
            am,
            lm,
            batch.targets,
            *batch.lengths("cpu"),
            lm_only_scale=lm_scale,
            am_only_scale=am_scale,
            reduction="none",
        ).loss

    assert torch.autograd.gradcheck(loss, inputs(batch), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", cases.DEVICES)
def test_padding_has_no_effect(device) -> None:
    """Also the unigram distribution of am smoothing leaves padding out."""
    batch = cases.make_batch([6, 4, 2], [3, 0, 2], 7, 0)
    clean = [x.detach() for x in inputs(batch)]
    dirty = [x.clone() for x in clean]
    targets = batch.targets.clone()
    for n, (frames, symbols) in enumerate(zip(batch.frames_N, batch.symbols_N, strict=True)):
        dirty[0][n, frames:] = float("nan")
        dirty[1][n, symbols + 1 :] = float("inf")
        targets[n, symbols:] = -5
    results = []
    for given, y in ((clean, batch.targets), (dirty, targets)):
        leaves = [x.to(device).requires_grad_() for x in given]
        loss, occupancy = pruned_rnnt.rnnt_loss_simple(
            *leaves,
            y.to(device),
            *batch.lengths(device),
            lm_only_scale=0.2,
            am_only_scale=0.2,
            reduction="none",
        )
        results.append((loss, *occupancy, *torch.autograd.grad(loss.sum(), leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("side", [0, 1], ids=["am", "lm"])
@pytest.mark.parametrize("am_scale", [0.0, 0.2])
def test_nan_stays_in_its_utterance(am_scale, side, device) -> None:
    """With am smoothing, q is the mean of the others."""
    batch = cases.make_batch([5, 5, 5], [2, 2, 2], 6, 0)
    values = [x.detach() for x in inputs(batch)]
    values[side][1, 1, 3] = float("nan")
    leaves = [x.to(device).requires_grad_() for x in values]
    loss, _ = pruned_rnnt.rnnt_loss_simple(
        *leaves,
        batch.targets.to(device),
        *batch.lengths(device),
        lm_only_scale=0.25,
        am_only_scale=am_scale,
        reduction="none",
    )
    grads = torch.autograd.grad(loss.sum(), leaves)
    assert loss.isnan().tolist() == [False, True, False]
    for grad in grads:
        assert grad[[0, 2]].isfinite().all()


@pytest.mark.parametrize("device", cases.DEVICES)
def test_fastemit_scales_the_gradient_through_symbols(device) -> None:
    batch = cases.every_small_batch("regular")
    am, lm = inputs(batch)
    emit, blank = smoothed_rows(am, lm, batch, 0.2, 0.1)
    scaled = [px + 0.7 * (px - px.detach()).nan_to_num(nan=0.0) for px in emit]
    wanted = cases.gradients(cases.reference_losses(scaled, blank, batch), batch.upstream(), am, lm)
    loss, _ = pruned_rnnt.rnnt_loss_simple(
        am.to(device),
        lm.to(device),
        batch.targets.to(device),
        *batch.lengths(device),
        lm_only_scale=0.2,
        am_only_scale=0.1,
        fastemit_lambda=0.7,
        reduction="none",
    )
    for grad, expected in zip(cases.gradients(loss, batch.upstream(), am, lm), wanted, strict=True):
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("device", cases.DEVICES)
def test_mixed_dtypes_and_strides_and_autocast(device) -> None:
    batch = cases.make_batch([6, 4], [3, 2], 7, 0)
    targets, lengths = batch.targets.to(device), batch.lengths(device)
    am, lm = (x.detach().float().to(device) for x in inputs(batch))
    lm = lm.half()
    turned = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in (am, lm)]
    losses = []
    for (a, b), autocast in itertools.product(((am, lm), turned), (False, True)):
        leaves = [a.clone().requires_grad_(), b.clone().requires_grad_()]
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss, _ = pruned_rnnt.rnnt_loss_simple(*leaves, targets, *lengths)
        loss.backward()
        assert [x.grad.dtype for x in leaves] == [torch.float32, torch.float16]
        losses.append((loss, *(x.grad for x in leaves)))
    for others in losses[1:]:
        for a, b in zip(losses[0], others, strict=True):
            assert torch.equal(a, b)
