"""The TDT loss of the trivial joiner, and the band that it chooses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt import TdtOccupancy
from tests.loss import loss_cases as cases
from tests.loss.tdt_cases import DURATIONS, simple_tdt_loss
from tests.tdt_paths import tdt_paths

USUAL = DURATIONS[0]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(41)


def trivial_inputs(batch: cases.Batch, count: int) -> list[Tensor]:
    """am, lm, duration_am, duration_lm."""
    shapes = [(batch.frames, batch.vocabulary), (batch.symbols + 1, batch.vocabulary)]
    shapes += [(batch.frames, count), (batch.symbols + 1, count)]
    return [
        torch.randn(batch.size, *shape, dtype=torch.float64).requires_grad_() for shape in shapes
    ]


def stored_logits(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    am, lm, duration_am, duration_lm = tensors
    return am[:, :, None] + lm[:, None], duration_am[:, :, None] + duration_lm[:, None]


def simple(batch: cases.Batch, tensors: list[Tensor], device: str = "cpu", **options):
    given = [x.to(device) for x in tensors]
    lengths = batch.lengths(device)
    return simple_tdt_loss(*given, batch.targets.to(device), *lengths, **options)


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("durations", DURATIONS, ids=str)
def test_simple_loss_equals_the_loss_of_stored_logits(durations, device) -> None:
    batch = cases.make_batch([9, 11, 7], [4, 6, 0], 7, 0)
    tensors = trivial_inputs(batch, len(durations))
    options = {"durations": durations, "sigma": 0.1, "fastemit_lambda": 0.2, "reduction": "none"}
    lengths = batch.lengths("cpu")
    expected = pruned_rnnt.rnnt_loss_tdt(
        *stored_logits(tensors), batch.targets, *lengths, **options
    )
    loss = simple(batch, tensors, device, **options).loss
    cases.assert_same_loss_and_gradients(loss, expected, batch.upstream(), *tensors)


def test_smoothing_leaves_durations_as_they_are() -> None:
    """With lm_only_scale 1, tokens depend on lm alone."""
    batch = cases.make_batch([6, 5], [3, 1], 7, 0)
    am, lm, *durations = trivial_inputs(batch, 5)
    expected = simple(batch, [torch.zeros_like(am), lm, *durations], reduction="none")
    got = simple(batch, [am, lm, *durations], reduction="none", lm_only_scale=1.0)
    torch.testing.assert_close(got.loss, expected.loss)


def test_gradcheck_with_smoothing() -> None:
    batch = cases.make_batch([4, 2], [2, 1], 4, 0)
    tensors = trivial_inputs(batch, 5)

    def loss(*given: Tensor) -> Tensor:
        scales = {"lm_only_scale": 0.25, "am_only_scale": 0.1}
        return simple(batch, list(given), reduction="none", **scales).loss

    assert torch.autograd.gradcheck(loss, tuple(tensors), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", cases.DEVICES)
def test_occupancies_are_those_of_all_paths(device) -> None:
    batch = cases.make_batch([4], [2], 5, 0)
    tensors = trivial_inputs(batch, len(USUAL))
    logits, durations = stored_logits(tensors)
    tokens, log_d = (x.detach().log_softmax(-1)[0] for x in (logits, durations))
    expected = TdtOccupancy(*torch.zeros(3, 4, 3, dtype=torch.float64), torch.zeros_like(log_d))
    paths, weights = list(tdt_paths(4, 2, USUAL)), []
    for path in paths:
        score = torch.zeros((), dtype=torch.float64)
        for t, u, is_symbol, n in path:
            v = int(batch.targets[0, u]) if is_symbol else 0
            score = score + tokens[t, u, v] + log_d[t, u, n]
        weights.append(score)
    for path, share in zip(paths, torch.stack(weights).softmax(0), strict=True):
        for t, u, is_symbol, n in path:
            (expected.emit if is_symbol else expected.blank)[t, u] += share
            expected.durations[t, u, n] += share
            if is_symbol and USUAL[n] == 0:
                expected.stay[t, u] += share
    got = simple(batch, tensors, device).occupancy
    for part, want in zip(got, expected, strict=True):
        torch.testing.assert_close(part[0].cpu(), want)
        assert not part.requires_grad


# Nodes (t, u) of a planted alignment that skips frames, and has two symbols in some.
PLANTED = [(0, 0), (2, 1), (5, 2), (5, 3), (8, 4), (12, 5), (12, 6), (14, 7), (16, 7)]
FRAMES, SYMBOLS = 20, 7


def planted_occupancy() -> TdtOccupancy:
    """One path has all the mass."""
    parts = TdtOccupancy(
        *torch.zeros(3, 1, FRAMES, SYMBOLS + 1), torch.zeros(1, FRAMES, SYMBOLS + 1, 5)
    )
    for (t, u), (later, above) in zip(PLANTED, [*PLANTED[1:], (FRAMES, SYMBOLS)], strict=True):
        (parts.blank if above == u else parts.emit)[0, t, u] = 1
        parts.durations[0, t, u, later - t] = 1
        if later == t:
            parts.stay[0, t, u] = 1
    return parts


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("s_range", [3, 4, 5])
def test_band_keeps_a_path_that_skips_frames(s_range, exact, device) -> None:
    occupancy = TdtOccupancy(*(x.to(device) for x in planted_occupancy()))
    bounds = pruned_rnnt.prune_bounds(occupancy, s_range=s_range, exact=exact, durations=USUAL)
    for t, u in PLANTED:
        assert 0 <= u - int(bounds.start[0, t]) < s_range, (t, u, bounds.start)


def test_frames_without_visits_take_the_window_before() -> None:
    """Rounding in a frame that no path visits does not move the band."""
    occupancy = planted_occupancy()
    expected = pruned_rnnt.prune_bounds(occupancy, s_range=3, durations=USUAL).start
    for t in (1, 3, 6, 10):
        occupancy.blank[0, t, SYMBOLS if t < 5 else 0] = 1e-4
    got = pruned_rnnt.prune_bounds(occupancy, s_range=3, durations=USUAL).start
    assert torch.equal(got, expected)


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("durations", [USUAL, (0, 1), (1, 2, 4)], ids=str)
@pytest.mark.parametrize("s_range", [2, 3, 5])
def test_every_band_has_a_path_and_a_loss_above_the_exact_one(s_range, durations, device) -> None:
    batch = cases.make_batch([5, 9, 12, 23], [4, 0, 5, 11], 7, 0)
    for scale in (0.3, 3.0):
        tensors = [scale * x.detach() for x in trivial_inputs(batch, len(durations))]
        exact = simple(batch, tensors, device, durations=durations, reduction="none")
        lengths = batch.lengths(device)
        bounds = pruned_rnnt.prune_bounds(exact.occupancy, *lengths, s_range, durations=durations)
        start = bounds.start.cpu()
        moves = start.diff(dim=1)
        assert bool((start[:, 0] == 0).all())
        assert bool(((moves >= 0) & (moves <= (s_range - 1 if 0 in durations else 1))).all())
        am, lm, duration_am, duration_lm = (x.to(device) for x in tensors)
        tokens = pruned_rnnt.prune(am, lm, bounds)
        numbers = pruned_rnnt.prune(duration_am, duration_lm, bounds)
        loss = pruned_rnnt.rnnt_loss_tdt(
            tokens.am + tokens.lm,
            numbers.am + numbers.lm,
            batch.targets.to(device),
            *lengths,
            durations=durations,
            bounds=bounds,
            reduction="none",
        )
        assert bool(loss.isfinite().all())
        assert bool((loss > exact.loss - 1e-9).all())


def test_a_wide_band_keeps_everything() -> None:
    batch = cases.make_batch([5, 4], [3, 1], 7, 0)
    occupancy = simple(batch, trivial_inputs(batch, 5)).occupancy
    lengths = batch.lengths("cpu")
    assert not pruned_rnnt.prune_bounds(occupancy, *lengths, 4, durations=USUAL).start.any()


def test_occupancy_and_durations_must_fit() -> None:
    plain = pruned_rnnt.Occupancy(torch.zeros(1, 2, 2), torch.zeros(1, 2, 2))
    with pytest.raises(ValueError, match="occupancy is not of a TDT loss"):
        pruned_rnnt.prune_bounds(plain, durations=USUAL)
    with pytest.raises(ValueError, match="durations is missing"):
        pruned_rnnt.prune_bounds(planted_occupancy())
    with pytest.raises(ValueError, match=r"occupancy.durations has shape .* 5\); .* 2\)"):
        pruned_rnnt.prune_bounds(planted_occupancy(), durations=(0, 1))
    with pytest.raises(ValueError, match=r"durations is \(0, 2, 3, 4, 5\); 1 must be among them"):
        pruned_rnnt.prune_bounds(planted_occupancy(), durations=(0, 2, 3, 4, 5))
    with pytest.raises(ValueError, match="durations need rnnt_type='regular'"):
        pruned_rnnt.prune_bounds(planted_occupancy(), durations=USUAL, rnnt_type="modified")
