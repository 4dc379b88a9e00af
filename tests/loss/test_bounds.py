"""prune_bounds and prune: constraints, the greedy rule step by step, and the optimum by search."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt import Bounds, Occupancy
from tests.loss import loss_cases as cases


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


# (T_n, U_n, s_range): ragged, empty references, one frame, narrow, wider than the lattice, tight.
CASES = [
    ([20, 13, 17], [9, 4, 0], 3),
    ([5, 5], [0, 0], 2),
    ([1, 1], [2, 0], 3),
    ([30, 25], [12, 12], 2),
    ([8, 6], [4, 3], 9),
    ([4, 6], [12, 9], 4),
    ([60, 41], [30, 17], 5),
]


def occupancy_of(frames_N: list[int], symbols_N: list[int], rnnt_type: str) -> tuple:
    batch = cases.make_batch(frames_N, symbols_N, 6, 0)
    am = 3 * torch.randn(batch.size, batch.frames, 6, dtype=torch.float64)
    lm = 3 * torch.randn(batch.size, batch.symbols + 1, 6, dtype=torch.float64)
    lengths = batch.lengths("cpu")
    arguments = (am, lm, batch.targets, *lengths)
    return pruned_rnnt.rnnt_loss_simple(*arguments, rnnt_type=rnnt_type).occupancy, lengths


def feasible(frames_N: list[int], symbols_N: list[int], s_range: int, rnnt_type: str) -> bool:
    if rnnt_type == "regular":
        return all((s_range - 1) * t >= u for t, u in zip(frames_N, symbols_N, strict=True))
    return all(t >= u for t, u in zip(frames_N, symbols_N, strict=True))


def score(occupancy: Occupancy, n: int, t: int, s: int, s_range: int, rnnt_type: str) -> float:
    kept = occupancy.blank[n, t, s : s + s_range].sum()
    if rnnt_type in ("modified", "rna"):
        return float(kept + occupancy.emit[n, t, s : s + s_range].sum())
    return float(kept - (occupancy.emit[n, t, s - 1] if s > 0 else 0))


def step_limit(s_range: int, rnnt_type: str) -> int:
    return s_range - 1 if rnnt_type == "regular" else 1


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("exact", [False, True], ids=["greedy", "exact"])
def test_a_band_of_a_billion_columns_begins_at_the_first(exact, device) -> None:
    """Its columns times frames are no 32-bit number."""
    occupancy, lengths = occupancy_of([60, 41], [30, 17], "regular")
    moved = Occupancy(*(x.to(device) for x in occupancy))
    bounds = pruned_rnnt.prune_bounds(moved, *lengths, 10**9, exact=exact)
    assert not bounds.start.any()
    assert bounds.s_range == 10**9


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("exact", [False, True], ids=["greedy", "exact"])
@pytest.mark.parametrize("rnnt_type", ["regular", "modified"])
@pytest.mark.parametrize(("frames_N", "symbols_N", "s_range"), CASES)
def test_constraints(frames_N, symbols_N, s_range, rnnt_type, exact, device) -> None:
    if not feasible(frames_N, symbols_N, s_range, rnnt_type):
        pytest.skip("no band of this width")
    occupancy, lengths = occupancy_of(frames_N, symbols_N, rnnt_type)
    moved = Occupancy(*(x.to(device) for x in occupancy))
    bounds = pruned_rnnt.prune_bounds(moved, *lengths, s_range, rnnt_type=rnnt_type, exact=exact)
    assert bounds.start.dtype == torch.int32
    assert bounds.s_range == s_range
    start = bounds.start.cpu()
    steps = start.diff(dim=1)
    assert (start[:, 0] == 0).all()
    assert (steps >= 0).all()
    assert (steps <= step_limit(s_range, rnnt_type)).all()
    for n, (frames, symbols) in enumerate(zip(frames_N, symbols_N, strict=True)):
        assert start[n, frames - 1] == max(symbols - s_range + 1, 0)
        assert start[n, -1] == max(symbols - s_range + 1, 0)
    ranges = bounds.ranges
    assert ranges.dtype == torch.int64
    assert torch.equal(ranges.cpu(), start[:, :, None] + torch.arange(s_range))


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("rnnt_type", ["regular", "modified"])
@pytest.mark.parametrize(("frames_N", "symbols_N", "s_range"), CASES)
def test_greedy_rule_step_by_step(frames_N, symbols_N, s_range, rnnt_type, device) -> None:
    """Steps 1 to 4 in plain Python."""
    if not feasible(frames_N, symbols_N, s_range, rnnt_type):
        pytest.skip("no band of this width")
    occupancy, lengths = occupancy_of(frames_N, symbols_N, rnnt_type)
    k = step_limit(s_range, rnnt_type)
    expected = []
    for n, (frames, symbols) in enumerate(zip(frames_N, symbols_N, strict=True)):
        last = max(symbols + 1 - s_range, 0)
        best = []
        for t in range(max(frames_N)):
            scores = [score(occupancy, n, t, s, s_range, rnnt_type) for s in range(last + 1)]
            tied = [s for s, x in enumerate(scores) if x >= max(scores) - 1e-5]
            best.append(tied[(len(tied) - 1) // 2] if t < frames - 1 else last)
        monotone = [min(best[t:]) for t in range(len(best))]
        expected.append(
            [
                min(k * t, max(s - k * i for i, s in enumerate(monotone[t:])))
                for t in range(len(best))
            ]
        )
    moved = Occupancy(*(x.to(device) for x in occupancy))
    bounds = pruned_rnnt.prune_bounds(moved, *lengths, s_range, rnnt_type=rnnt_type)
    assert bounds.start.tolist() == expected


def retained(
    occupancy: Occupancy, start: Tensor, n: int, frames: int, s_range: int, rnnt_type: str
) -> float:
    return sum(score(occupancy, n, t, int(start[n, t]), s_range, rnnt_type) for t in range(frames))


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("rnnt_type", ["regular", "modified"])
@pytest.mark.parametrize(("frames_N", "symbols_N", "s_range"), CASES)
def test_exact_retains_at_least_what_greedy_does(
    frames_N, symbols_N, s_range, rnnt_type, device
) -> None:
    if not feasible(frames_N, symbols_N, s_range, rnnt_type):
        pytest.skip("no band of this width")
    occupancy, lengths = occupancy_of(frames_N, symbols_N, rnnt_type)
    moved = Occupancy(*(x.to(device) for x in occupancy))
    greedy, exact = (
        pruned_rnnt.prune_bounds(moved, *lengths, s_range, rnnt_type=rnnt_type, exact=e).start.cpu()
        for e in (False, True)
    )
    for n, frames in enumerate(frames_N):
        least = retained(occupancy, greedy, n, frames, s_range, rnnt_type)
        assert retained(occupancy, exact, n, frames, s_range, rnnt_type) >= least - 1e-9


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("rnnt_type", ["regular", "modified"])
@pytest.mark.parametrize("s_range", [2, 3])
@pytest.mark.parametrize("trial", range(8))
def test_exact_is_the_optimum_over_all_bands(trial, s_range, rnnt_type, device) -> None:
    """Random numbers in place of occupancies, where the greedy rule is often not the best."""
    torch.manual_seed(trial)
    frames, symbols = 5, 4
    occupancy = Occupancy(*torch.rand(2, 1, frames, symbols + 1, dtype=torch.float64))
    last, k = symbols + 1 - s_range, step_limit(s_range, rnnt_type)
    best = -math.inf
    for steps in itertools.product(range(k + 1), repeat=frames - 1):
        band = [0, *itertools.accumulate(steps)]
        if band[-1] == last:
            value = sum(score(occupancy, 0, t, s, s_range, rnnt_type) for t, s in enumerate(band))
            best = max(best, value)
    moved = Occupancy(*(x.to(device) for x in occupancy))
    start = pruned_rnnt.prune_bounds(moved, None, None, s_range, rnnt_type=rnnt_type, exact=True)[0]
    assert retained(occupancy, start.cpu(), 0, frames, s_range, rnnt_type) == pytest.approx(
        best, abs=1e-12
    )


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("exact", [False, True], ids=["greedy", "exact"])
@pytest.mark.parametrize("rnnt_type", ["regular", "modified", "constrained", "rna"])
def test_a_certain_path_is_kept(rnnt_type, exact, device) -> None:
    """Frames that surely emit have no blank mass in one-arc topologies; the choice uses emits."""
    frames, symbols, s_range = 24, 8, 3
    path = [min(t // 2, symbols) for t in range(frames)]
    px = torch.full((1, frames, symbols + 1), -40.0, dtype=torch.float64)
    py = px.clone()
    for t, u in enumerate(path):
        emits = t % 2 == 1 and u < symbols
        (px if emits else py)[0, t, u] = 0.0
        if emits and rnnt_type in ("regular", "constrained"):
            py[0, t, u + 1] = 0.0
    k2_px = px.transpose(1, 2)[:, :-1]
    if rnnt_type == "regular":
        k2_px = torch.nn.functional.pad(k2_px, (0, 1), value=-math.inf)
    gx, gy = pruned_rnnt.mutual_information(
        k2_px.contiguous(), py.transpose(1, 2).contiguous(), rnnt_type=rnnt_type
    ).occupancy
    emit = torch.nn.functional.pad(gx[:, :, :frames], (0, 0, 0, 1)).transpose(1, 2).contiguous()
    occupancy = Occupancy(emit.to(device), gy.transpose(1, 2).contiguous().to(device))
    start = pruned_rnnt.prune_bounds(
        occupancy, None, None, s_range, rnnt_type=rnnt_type, exact=exact
    ).start.cpu()[0]
    for t, u in enumerate(path):
        assert start[t] <= u < start[t] + s_range


@pytest.mark.parametrize("device", cases.DEVICES)
def test_bounds_do_not_depend_on_the_padding(device) -> None:
    occupancy, lengths = occupancy_of([20, 13], [9, 4], "regular")
    occupancy = Occupancy(*(x.to(device) for x in occupancy))
    bounds = pruned_rnnt.prune_bounds(occupancy, *lengths, 3)
    alone = Occupancy(*(x[1:, :13, :5] for x in occupancy))
    assert torch.equal(pruned_rnnt.prune_bounds(alone, s_range=3).start[0], bounds.start[1, :13])


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_prune_gathers_and_sums_gradients(dtype, device) -> None:
    start = torch.tensor([[0, 0, 2, 3], [0, 1, 1, 1]], dtype=torch.int32)
    bounds = Bounds(start.to(device), 3)
    am = torch.randn(2, 4, 6).to(device, dtype).requires_grad_()
    lm = torch.randn(2, 5, 7).to(device, dtype).requires_grad_()
    am_p, lm_p = pruned_rnnt.prune(am, lm, bounds)
    assert am_p.shape == (2, 4, 3, 6)
    assert lm_p.shape == (2, 4, 3, 7)
    weight = torch.randn(2, 4, 3, 7).to(device, dtype)
    (grad,) = torch.autograd.grad(lm_p, lm, weight)
    expected = torch.zeros(2, 5, 7)
    for n, t, j in itertools.product(range(2), range(4), range(3)):
        u = int(start[n, t]) + j
        inside = u < 5
        wanted = lm[n, u] if inside else torch.zeros_like(lm[0, 0])
        assert torch.equal(lm_p[n, t, j], wanted)
        assert torch.equal(am_p[n, t, j], am[n, t])
        if inside:
            expected[n, u] += weight[n, t, j].float().cpu()
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(grad.cpu().float(), expected, rtol=tolerance, atol=tolerance)
    assert am_p.requires_grad


@pytest.mark.parametrize("rnnt_type", cases.RNNT_TYPES)
@pytest.mark.parametrize("s_range", [2, 3, 4])
def test_bands_without_a_path_are_refused(s_range, rnnt_type) -> None:
    """Any band, also one that goes back or jumps; with log-probs of 0 the loss is finite where a
    path exists."""
    torch.manual_seed(s_range)
    frames, symbols, trials = 5, 4, 200
    steps = torch.randint(-1, s_range + 1, (trials, frames))
    start = (steps.cumsum(1) - steps[:, :1]).clamp(0, symbols).int()
    lengths = torch.randint(1, frames + 1, (trials,)), torch.randint(0, symbols + 1, (trials,))
    targets = torch.ones(trials, symbols, dtype=torch.int32)
    zeros = torch.zeros(s_range, 2)
    outcomes = []
    for n in range(trials):
        t, u = lengths[0][n : n + 1], lengths[1][n : n + 1]
        if not cases.has_path(int(t), int(u), rnnt_type):
            continue
        rows = [torch.zeros(frames, int(u) + 1, dtype=torch.float64) for _ in range(2)]
        rows[0][:, -1] = -torch.inf
        one = cases.Batch([int(t)], [int(u)], targets[:1], frames, symbols, 2, 0)
        expected = cases.reference_losses(
            [rows[0]], [rows[1]], one, rnnt_type, 0.0, start[n : n + 1], s_range
        )
        arguments = (
            zeros.expand(1, frames, s_range, 2),
            targets[:1],
            Bounds(start[n : n + 1], s_range),
            t,
            u,
        )
        try:
            loss = pruned_rnnt.rnnt_loss_pruned(
                *arguments, rnnt_type=rnnt_type, from_log_probs=True, reduction="none"
            )
        except ValueError:
            assert expected.isinf()
        else:
            torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
        outcomes.append(bool(expected.isinf()))
    assert 20 < sum(outcomes) < len(outcomes) - 20
