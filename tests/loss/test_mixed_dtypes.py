"""Inputs of several floating dtypes: the result of torch's promotion, or of one accumulator.

Axes: N batch, T frames, U symbols, V vocabulary, K durations.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt import Bounds, Occupancy, TdtOccupancy
from pruned_rnnt.diagnostics import log_prob_rows
from tests.loss import bad_input_calls as calls
from tests.loss.loss_cases import DEVICES

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
MIXED = [(a, b) for a in FLOATS for b in FLOATS if a != b]
DURATIONS = (0, 1, 2)


def loss_and_gradients(leaves: list[Tensor], device: str) -> tuple[Tensor, list[Tensor]]:
    given = calls.arguments()
    batch = [given[name].to(device) for name in ("targets", "logit_lengths", "target_lengths")]
    leaves = [x.detach().to(device).requires_grad_() for x in leaves]
    loss = pruned_rnnt.rnnt_loss_tdt(*leaves, *batch, durations=DURATIONS, reduction="none")
    return loss, list(torch.autograd.grad(loss.sum(), leaves))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "duration_dtype"), MIXED)
def test_logits_and_duration_logits(dtype, duration_dtype, device) -> None:
    logits = calls.arguments()["logits"].to(dtype)
    generator = torch.Generator().manual_seed(1)
    durations = torch.randn(*logits.shape[:3], 3, generator=generator).to(duration_dtype)
    loss, grads = loss_and_gradients([logits, durations], device)
    expected, wanted = loss_and_gradients([logits.double(), durations.double()], device)
    is_double = torch.float64 in (dtype, duration_dtype)
    assert loss.dtype == (torch.float64 if is_double else torch.float32)
    tolerance = 1e-12 if is_double else 1e-5
    torch.testing.assert_close(loss.double(), expected, rtol=tolerance, atol=tolerance)
    for grad, right, given in zip(grads, wanted, (dtype, duration_dtype), strict=True):
        assert grad.dtype == given
        rounding = max(torch.finfo(given).eps, 1e-5)
        torch.testing.assert_close(grad.double(), right, rtol=rounding, atol=rounding)


def test_logits_that_are_promoted_cannot_be_overwritten() -> None:
    given = calls.arguments()
    lengths = (given["logit_lengths"], given["target_lengths"])
    durations = torch.zeros(*given["logits"].shape[:3], 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="in_place=True needs duration_logits of the precision"):
        pruned_rnnt.rnnt_loss_tdt(
            given["logits"],
            durations,
            given["targets"],
            *lengths,
            durations=DURATIONS,
            in_place=True,
        )


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "other"), [*MIXED, *((x, x) for x in FLOATS)])
def test_occupancies(dtype, other, device, exact) -> None:
    given = calls.arguments()
    lengths = (given["logit_lengths"], given["target_lengths"])
    simple = pruned_rnnt.rnnt_loss_simple(given["am"], given["lm"], given["targets"], *lengths)
    emit, blank = (x.to(device) for x in simple.occupancy)
    # Values that all dtypes have.
    emit, blank = ((x * 64).round() / 64 for x in (emit, blank))
    options = {"s_range": 3, "exact": exact}
    expected = pruned_rnnt.prune_bounds(Occupancy(emit, blank), *lengths, **options).start
    mixed = Occupancy(emit.to(dtype), blank.to(other))
    both = torch.stack((emit, blank), -1)
    assert torch.equal(pruned_rnnt.prune_bounds(mixed, *lengths, **options).start, expected)
    parts = (emit.to(dtype), blank.to(other), torch.zeros_like(emit), both)
    whole = (emit, blank, torch.zeros_like(emit), both)
    starts = [
        pruned_rnnt.prune_bounds(TdtOccupancy(*x), *lengths, durations=(0, 1), **options).start
        for x in (parts, whole)
    ]
    assert torch.equal(*starts)


def test_parts_of_an_occupancy_have_one_shape() -> None:
    x = torch.zeros(2, 3, 4)
    narrow = TdtOccupancy(x, x, x[:, :, 1:], x[..., None])
    with pytest.raises(ValueError, match=r"occupancy\.stay has shape"):
        pruned_rnnt.prune_bounds(narrow, s_range=2, durations=(0, 1))
    sparse = TdtOccupancy(x, x.to_sparse(), x, x[..., None])
    with pytest.raises(ValueError, match=r"occupancy\.blank is of layout"):
        pruned_rnnt.prune_bounds(sparse, s_range=2, durations=(0, 1))


@pytest.mark.parametrize(("dtype", "other"), MIXED)
def test_mutual_information(dtype, other) -> None:
    given = calls.arguments()
    px, py = given["px"].to(dtype), given["py"].to(other)
    found = pruned_rnnt.mutual_information(px, py).total
    expected = pruned_rnnt.mutual_information(px.double(), py.double()).total
    assert found.dtype == (torch.float64 if torch.float64 in (dtype, other) else torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_of_a_band(dtype, device) -> None:
    given = {name: x.to(device) for name, x in calls.arguments().items()}
    start = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1], [0] * 6], device=device)
    names = ("targets", "logit_lengths", "target_lengths")
    batch = [given[name].to(dtype) for name in names]
    whole = log_prob_rows(given["logits"], *batch)
    columns = start[:, :, None] + torch.arange(3, device=device)
    at = columns[..., None].expand(-1, -1, -1, calls.V)
    band = log_prob_rows(given["logits"].gather(2, at), *batch, bounds=Bounds(start.to(dtype), 3))
    for found, wanted in zip(band, whole, strict=True):
        torch.testing.assert_close(found, wanted.gather(2, columns))


WRONG_ROWS = [
    ({"bounds": Bounds(torch.zeros(3, 6), 4)}, "bounds.start is torch.float32"),
    ({"bounds": Bounds(torch.zeros(3, 5, dtype=torch.int32), 4)}, "bounds.start has shape"),
    ({"blank": calls.V}, f"blank is {calls.V}"),
    ({"blank": 0.0}, "blank is 0.0"),
    ({"targets": torch.zeros(2, 3, dtype=torch.int32)}, "targets has shape"),
    ({"logit_lengths": torch.tensor([6.0, 5.0, 4.0])}, "logit_lengths is torch.float32"),
    ({"target_lengths": torch.tensor([3, 2])}, "target_lengths has shape"),
]


@pytest.mark.parametrize(("changed", "words"), WRONG_ROWS)
def test_rows_of_other_arguments_are_refused(changed, words) -> None:
    names = ("logits", "targets", "logit_lengths", "target_lengths")
    given = {name: calls.arguments()[name] for name in names} | changed
    with pytest.raises((TypeError, ValueError), match=words):
        log_prob_rows(**given)
