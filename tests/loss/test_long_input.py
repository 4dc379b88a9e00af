"""float32 against float64 on long input: occupancies, gradients and losses stay accurate."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt import Bounds
from pruned_rnnt.ops.common.row_geometry import LatticeRows
from pruned_rnnt.ops.lattice.recursion import LossOptions, Recursion, run_recursion
from pruned_rnnt.ops.lattice.tdt_lattice import TdtOptions, TdtSums
from tests.loss.loss_cases import DEVICES

# A frame's blanks have a mass of 1 (`regular`).
MASS_ERROR = 1e-5
# Relative error (L2) of occupancies. alpha + beta - total, which rounds each term at its own size,
# has an error of 0.7 at 5,000 frames.
OCCUPANCY_ERROR = 1e-5
# Of the gradients of logits, whose log-probabilities are rounded, too.
GRADIENT_ERROR = 1e-4
SIZES = [(500, 50), (2000, 200), (5000, 100), (30_000, 60)]
DURATIONS = [0, 1, 2, 3, 4]


class Arcs(NamedTuple):
    """Log-probabilities emit (1,U,T+1) and blank (1,U+1,T)."""

    emit: Tensor
    blank: Tensor


def flat(frames: int, symbols: int, vocabulary: int = 50) -> Arcs:
    score = -torch.tensor(float(vocabulary)).log()
    return Arcs(score.expand(1, symbols, frames + 1), score.expand(1, symbols + 1, frames))


def drawn(frames: int, symbols: int) -> Arcs:
    rows = torch.randn(1, symbols + 1, frames + 1, 20).log_softmax(-1)
    return Arcs(rows[:, :symbols, :, 1], rows[:, :, :frames, 0])


def trained(frames: int, symbols: int) -> Arcs:
    """Symbols at known frames; the same small probability of an emit everywhere else."""
    emit = torch.full((1, symbols, frames + 1), -12.0)
    blank = torch.full((1, symbols + 1, frames), -6e-6)
    times = torch.randperm(frames - 3)[:symbols].sort().values.tolist()
    for u, t in enumerate(times):
        emit[0, u, t : t + 3] = torch.tensor([0.4, 0.5, 0.3]).log()
        blank[0, u, t : t + 3] = torch.tensor([0.6, 0.5, 0.7]).log()
    return Arcs(emit, blank)


KINDS = {"flat": flat, "drawn": drawn, "trained": trained}


def relative_error(got: Tensor, exact: Tensor) -> float:
    return float((got.cpu().double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("frames", "symbols"), SIZES)
def test_occupancies(kind, frames, symbols, device) -> None:
    torch.manual_seed(frames)
    emit, blank = KINDS[kind](frames, symbols)
    emit = emit.clone()
    emit[:, :, -1] = -torch.inf
    exact = pruned_rnnt.mutual_information(emit.double(), blank.double())
    got = pruned_rnnt.mutual_information(emit.to(device), blank.to(device))
    # P is rounded at every frame, by 2^-25 of itself in the mean.
    torch.testing.assert_close(got.total.cpu().double(), exact.total, rtol=1e-6, atol=3e-8 * frames)
    mass = got.occupancy.blank.double().sum(1)
    assert float((mass - 1).abs().max()) < MASS_ERROR
    for part, wanted in zip(got.occupancy, exact.occupancy, strict=True):
        assert relative_error(part, wanted) < OCCUPANCY_ERROR


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rnnt_type", ["regular", "modified", "constrained", "rna"])
@pytest.mark.parametrize("columns", [5, 8, 20, None])
def test_rows_of_every_topology(columns, rnnt_type, device) -> None:
    """Gradients of the full loss, and of bands with different geometries."""
    torch.manual_seed(1)
    frames, symbols, vocabulary = 5000, 60, 4
    width = columns or symbols + 1
    logits = 2 * torch.randn(1, frames, width, vocabulary)
    targets = torch.randint(1, vocabulary, (1, symbols))
    slope = (symbols + 1 - width) / (frames - 2)
    start = (slope * torch.arange(frames)).int().clamp(max=symbols + 1 - width)[None]
    grads, losses = [], []
    for where, dtype in (("cpu", torch.float64), (device, torch.float32)):
        leaf = logits.to(where, dtype).requires_grad_()
        moved = targets.to(where)
        if columns is None:
            loss = pruned_rnnt.rnnt_loss(leaf, moved, rnnt_type=rnnt_type)
        else:
            bounds = Bounds(start.to(where), width)
            loss = pruned_rnnt.rnnt_loss_pruned(leaf, moved, bounds, rnnt_type=rnnt_type)
        loss.backward()
        losses.append(loss.detach().cpu().double())
        grads.append(leaf.grad)
    assert losses[0].isfinite()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    assert relative_error(grads[1], grads[0]) < GRADIENT_ERROR


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["flat", "drawn"])
@pytest.mark.parametrize(("frames", "symbols"), [(5000, 100), (30_000, 60)])
def test_simple_loss(kind, frames, symbols, device) -> None:
    torch.manual_seed(frames)
    scale = 0.0 if kind == "flat" else 1.5
    am, lm = scale * torch.randn(1, frames, 20), scale * torch.randn(1, symbols + 1, 20)
    targets = torch.randint(1, 20, (1, symbols))
    grads, losses, bands = [], [], []
    for where, dtype in (("cpu", torch.float64), (device, torch.float32)):
        leaves = [x.to(where, dtype).requires_grad_() for x in (am, lm)]
        loss, occupancy = pruned_rnnt.rnnt_loss_simple(
            *leaves, targets.to(where), lm_only_scale=0.25
        )
        grads.append(torch.autograd.grad(loss, leaves))
        losses.append(loss.detach().cpu().double())
        mass = occupancy.blank.double().sum(2)
        assert float((mass - 1).abs().max()) < MASS_ERROR
        lengths = [torch.tensor([x], device=where) for x in (frames, symbols)]
        bands.append(pruned_rnnt.prune_bounds(occupancy, *lengths, 5).start.cpu())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for got, exact in zip(grads[1], grads[0], strict=True):
        assert relative_error(got, exact) < GRADIENT_ERROR
    # float32 may choose another of two windows whose scores differ by less than rounding.
    assert (bands[0] != bands[1]).double().mean() < 1e-3


@pytest.mark.parametrize("device", DEVICES)
def test_the_loss_of_thirty_thousand_frames(device) -> None:
    """Uniform logits: all paths are equally likely, and there are binomially many."""
    frames, symbols, vocabulary = 30_000, 400, 100
    score = -torch.tensor(float(vocabulary), device=device).log()
    emit = score.expand(1, symbols, frames + 1).clone()
    emit[:, :, -1] = -torch.inf
    total = pruned_rnnt.mutual_information(emit, score.expand(1, symbols + 1, frames)).total
    number = torch.tensor([frames + symbols, symbols + 1.0, frames * 1.0], dtype=torch.float64)
    paths = number[0].lgamma() - number[1].lgamma() - number[2].lgamma()
    exact = paths + (frames + symbols) * score.double().cpu()
    # Half a unit in the last place of such a number is 0.008.
    torch.testing.assert_close(total[0].cpu().double(), exact, rtol=0, atol=0.02)


def recursion(scores: Tensor, logits: Tensor) -> TdtSums:
    """For scores px, py (2,T,U+1) and duration logits (T,U+1,K)."""
    _, frames, width = scores.shape
    device = scores.device
    lengths = [torch.tensor([x], dtype=torch.int32, device=device) for x in (frames, width - 1)]
    rows = LatticeRows(*lengths, None, None, frames, width)
    options = LossOptions(0, 0, 0, 0.0, 0.0, 0.0)
    of_tdt = Recursion(options, TdtOptions(DURATIONS, 0.02, 0.0))
    px, py = scores[:, None].contiguous().unbind(0)
    logits = logits[None].contiguous()
    return run_recursion(px, py, rows, of_tdt, logits, symbols=width - 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("frames", "symbols"), [(5000, 60), pytest.param(30_000, 20, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", ["drawn", "trained"])
def test_tdt_occupancies(kind, frames, symbols, device) -> None:
    torch.manual_seed(frames)
    width = symbols + 1
    logits = torch.randn(frames, width, len(DURATIONS))
    if kind == "drawn":
        scores = torch.randn(frames, width, 20).log_softmax(-1)[..., :2].movedim(-1, 0).contiguous()
    else:
        # Symbols at known frames, and a small probability of one everywhere else.
        scores = torch.stack([torch.full((frames, width), x) for x in (-12.0, -6e-6)])
        times = torch.randperm(frames - 3)[:symbols].sort().values
        for column, t in enumerate(times.tolist()):
            scores[0, t : t + 3, column] = torch.tensor([0.4, 0.5, 0.3]).log()
            scores[1, t : t + 3, column] = torch.tensor([0.6, 0.5, 0.7]).log()
    scores[0, :, -1] = -torch.inf
    exact = recursion(scores.double(), logits.double())
    got = recursion(scores.to(device), logits.to(device))
    torch.testing.assert_close(got.total.cpu().double(), exact.total, rtol=1e-6, atol=3e-8 * frames)
    # Every path takes each symbol once, and advances by all frames.
    assert float((got.gx.double().sum(1)[0, :-1] - 1).abs().max()) < MASS_ERROR
    advanced = (got.gd.double().sum((0, 1, 2)).cpu() * torch.tensor(DURATIONS)).sum()
    assert abs(float(advanced) / frames - 1) < MASS_ERROR
    for part, wanted in zip(got[1:], exact[1:], strict=True):
        assert relative_error(part, wanted) < OCCUPANCY_ERROR


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [5, None])
def test_tdt_gradients(columns, device) -> None:
    torch.manual_seed(1)
    frames, symbols, vocabulary = 5000, 40, 4
    width = columns or symbols + 1
    logits = 2 * torch.randn(1, frames, width, vocabulary)
    durations = torch.randn(1, frames, width, len(DURATIONS))
    targets = torch.randint(1, vocabulary, (1, symbols))
    start = (torch.arange(frames) * (symbols + 1 - width) / (frames - 2)).int()
    start = start.clamp(max=symbols + 1 - width)[None]
    losses, grads = [], []
    for where, dtype in (("cpu", torch.float64), (device, torch.float32)):
        leaves = [x.to(where, dtype).requires_grad_() for x in (logits, durations)]
        bounds = None if columns is None else Bounds(start.to(where), columns)
        loss = pruned_rnnt.rnnt_loss_tdt(*leaves, targets.to(where), bounds=bounds)
        grads.append(torch.autograd.grad(loss, leaves))
        losses.append(loss.detach().cpu().double())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for got, exact in zip(grads[1], grads[0], strict=True):
        assert relative_error(got, exact) < GRADIENT_ERROR
