"""rnnt_loss_pruned against all paths inside the band, and against the full loss for wide bands."""

from functools import partial

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt import Bounds
from tests.loss import loss_cases as cases

pruned_loss = partial(cases.loss_on_device, pruned_rnnt.rnnt_loss_pruned)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)


def bounds_of(batch, s_range: int, rnnt_type: str) -> Bounds:
    """A random band from the first to the last symbol."""
    start = torch.zeros(batch.size, batch.frames, dtype=torch.int32)
    step = s_range - 1 if rnnt_type == "regular" else 1
    for n, (frames, symbols) in enumerate(zip(batch.frames_N, batch.symbols_N, strict=True)):
        last = max(symbols + 1 - s_range, 0)
        for t in range(1, batch.frames):
            least = max(int(start[n, t - 1]), last - step * max(frames - 1 - t, 0))
            most = min(int(start[n, t - 1]) + step, last)
            start[n, t] = torch.randint(least, most + 1, ())
    return Bounds(start, s_range)


def inside_band(logits: Tensor, bounds: Bounds) -> Tensor:
    """Logits (N,T,S,V) of the band, differentiable; columns beyond U are those of U."""
    n = torch.arange(logits.shape[0])[:, None, None]
    t = torch.arange(logits.shape[1])[None, :, None]
    return logits[n, t, bounds.ranges.clamp_max(logits.shape[2] - 1)]


def packed_band(logits: Tensor, batch) -> Tensor:
    return torch.cat([logits[n, :t].flatten(0, 1) for n, t in enumerate(batch.frames_N)])


def wide_enough(batch, s_range: int, rnnt_type: str):
    """The utterances that have a band of this width."""
    step = s_range - 1 if rnnt_type == "regular" else 1
    kept = [
        n
        for n, (t, u) in enumerate(zip(batch.frames_N, batch.symbols_N, strict=True))
        if (t - 1) * step >= u + 1 - s_range
    ]
    return batch._replace(
        frames_N=[batch.frames_N[n] for n in kept],
        symbols_N=[batch.symbols_N[n] for n in kept],
        targets=batch.targets[kept],
    )


@pytest.mark.parametrize("device", cases.DEVICES)
@cases.every_layout
@cases.every_form
@pytest.mark.parametrize("rnnt_type", cases.RNNT_TYPES)
@pytest.mark.parametrize(
    ("s_range", "blank", "delay_penalty"), [(2, 0, 0.0), (3, 4, 0.3), (7, 2, -0.2)]
)
def test_value_and_gradient_are_those_of_the_paths_inside(
    rnnt_type, form, packed, s_range, blank, delay_penalty, device
) -> None:
    batch = wide_enough(cases.every_small_batch(rnnt_type, blank), s_range, rnnt_type)
    bounds = bounds_of(batch, s_range, rnnt_type)
    logits = cases.random_logits(batch)
    rows = cases.reference_rows(logits, batch, **form)
    expected = cases.reference_losses(*rows, batch, rnnt_type, delay_penalty, bounds.start, s_range)
    band = inside_band(logits, bounds)
    given = packed_band(band, batch) if packed else band
    options = {"blank": blank, "rnnt_type": rnnt_type, "delay_penalty": delay_penalty, **form}
    loss = pruned_loss(batch, [given], bounds, device, **options)
    cases.assert_same_loss_and_gradients(loss, expected, batch.upstream(), logits)


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("rnnt_type", cases.RNNT_TYPES)
@pytest.mark.parametrize("s_range", [5, 17, 40])
def test_larger_bands_equal_the_plain_torch_twin(s_range, rnnt_type, device) -> None:
    batch = cases.make_batch([37, 41, 40], [21, 0, 36], 7, 0)
    bounds = bounds_of(batch, s_range, rnnt_type)
    logits = cases.random_logits(batch)
    rows = cases.reference_rows(logits, batch)
    expected = cases.reference_losses(
        *rows, batch, rnnt_type, 0.0, bounds.start, s_range, total=cases.twin_total
    )
    band = inside_band(logits, bounds)
    loss = pruned_loss(batch, [band], bounds, device, rnnt_type=rnnt_type)
    cases.assert_same_loss_and_gradients(loss, expected, batch.upstream(), logits)


@pytest.mark.parametrize("device", cases.DEVICES)
@cases.tolerances(float32=2e-5, float16=2e-3, bfloat16=1e-2)
def test_dtypes(dtype, tolerance, device) -> None:
    batch = cases.make_batch([19, 23, 8], [6, 9, 3], 33, 0)
    bounds = bounds_of(batch, 4, "regular")
    shape = (batch.size, batch.frames, batch.symbols + 1, batch.vocabulary)
    band = inside_band(torch.randn(shape), bounds).to(dtype)
    losses, grads = [], []
    for wanted, place in ((torch.float64, "cpu"), (dtype, device)):
        given = band.to(place, wanted).requires_grad_()
        loss = pruned_loss(batch, [given], bounds, place)
        losses.append(loss.cpu().double())
        (grad,) = torch.autograd.grad((loss * batch.upstream().to(loss)).sum(), given)
        assert grad.dtype == wanted
        grads.append(grad.cpu().double())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads[1], grads[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("rnnt_type", cases.RNNT_TYPES)
def test_a_band_over_everything_is_the_full_loss(rnnt_type, device) -> None:
    batch = cases.every_small_batch(rnnt_type)
    columns = batch.symbols + 1
    logits = torch.randn(batch.size, 4, columns, 5, dtype=torch.float64).to(device)
    bounds = Bounds(torch.zeros(batch.size, 4, dtype=torch.int32, device=device), columns)
    targets, lengths = batch.targets.to(device), batch.lengths(device)
    full = pruned_rnnt.rnnt_loss(logits, targets, *lengths, rnnt_type=rnnt_type)
    pruned = pruned_rnnt.rnnt_loss_pruned(logits, targets, bounds, *lengths, rnnt_type=rnnt_type)
    torch.testing.assert_close(pruned, full, rtol=1e-13, atol=0)
    inside = pruned_rnnt.rnnt_loss(logits, targets, *lengths, bounds=bounds, rnnt_type=rnnt_type)
    assert torch.equal(inside, pruned)


@pytest.mark.parametrize("device", cases.DEVICES)
def test_options_are_those_of_the_full_loss(device) -> None:
    """FastEmit, clamp, in place: with a band over everything, equal to rnnt_loss."""
    batch = cases.make_batch([6, 5], [3, 2], 7, 0)
    logits = torch.randn(2, 6, 4, 7, dtype=torch.float64).to(device)
    bounds = Bounds(torch.zeros(2, 6, dtype=torch.int64, device=device), 4)
    targets, lengths = batch.targets.to(device), batch.lengths(device)
    options = {"fastemit_lambda": 0.4, "clamp": 0.1, "reduction": "sum"}
    grads = []
    for in_place in (False, True):
        full, band = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        pruned_rnnt.rnnt_loss(full, targets, *lengths, in_place=in_place, **options).backward()
        pruned_rnnt.rnnt_loss_pruned(
            band, targets, bounds, *lengths, in_place=in_place, **options
        ).backward()
        torch.testing.assert_close(band.grad, full.grad, rtol=1e-12, atol=1e-14)
        grads.append(band.grad)
    assert torch.equal(grads[0], grads[1])


def test_gradcheck() -> None:
    batch = cases.make_batch([4, 5], [3, 2], 4, 0)
    bounds = bounds_of(batch, 2, "regular")
    band = torch.randn(2, 5, 2, 4, dtype=torch.float64, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        lengths = batch.lengths("cpu")
        return pruned_rnnt.rnnt_loss_pruned(x, batch.targets, bounds, *lengths, reduction="none")

    assert torch.autograd.gradcheck(loss, band, eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", cases.DEVICES)
def test_padding_has_no_effect(device) -> None:
    """Also the columns of the band beyond an utterance's last symbol."""
    batch = cases.make_batch([6, 4], [3, 1], 7, 0)
    bounds = bounds_of(batch, 3, "regular")
    band = torch.randn(2, 6, 3, 7, dtype=torch.float64)
    dirty = band.clone()
    dirty[1, 4:] = float("nan")
    dirty[bounds.ranges > torch.tensor([3, 1])[:, None, None]] = float("inf")
    grads = []
    moved = Bounds(bounds.start.to(device), 3)
    targets, lengths = batch.targets.to(device), batch.lengths(device)
    for x in (band, dirty):
        leaf = x.to(device).requires_grad_()
        pruned_rnnt.rnnt_loss_pruned(leaf, targets, moved, *lengths).backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)
