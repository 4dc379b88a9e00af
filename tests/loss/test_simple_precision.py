"""Gradients of the simple loss in 16 bits: no more than a few times the error of rounding alone.

The unit is the error of the exact gradient, rounded to 16 bits once. Models that are trained are
the hard case: softmax and occupancy are then nearly equal, and the gradient is their difference.

Axes: N batch, T frames, U symbols, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt.ops.simple import simple_loss, simple_products, streamed_loss
from tests.loss import loss_cases as cases
from tests.loss.tdt_cases import simple_tdt_loss

# The largest error, in the unit of the module docstring.
LIMITS = {torch.float16: 3.0, torch.bfloat16: 2.0}
DURATIONS = (0, 1, 2, 4)


class Problem(NamedTuple):
    """am (N,T,V), lm (N,U+1,V) in float64, targets (N,U) and lengths (N) int32."""

    am: Tensor
    lm: Tensor
    targets: Tensor
    logit_lengths: Tensor
    target_lengths: Tensor

    def to(self, device: str, dtype: torch.dtype) -> Problem:
        sides = [x.to(device, dtype) for x in self[:2]]
        return Problem(*sides, *[x.to(device) for x in self[2:]])


def random_problem(
    frames_N: list[int], symbols_N: list[int], vocabulary: int, scale: float
) -> Problem:
    torch.manual_seed(7)
    batch = cases.make_batch(frames_N, symbols_N, vocabulary, 0)
    shapes = ((batch.size, x, vocabulary) for x in (batch.frames, batch.symbols + 1))
    am, lm = (scale * torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return Problem(am, lm, batch.targets, *batch.lengths("cpu"))


def peaked(distance: float) -> Problem:
    """One symbol of each row ahead of all others."""
    problem = random_problem([40, 30, 12], [10, 7, 5], 100, 1.0)
    for x in problem[:2]:
        at = torch.randint(0, x.shape[2], (*x.shape[:2], 1))
        x.scatter_add_(2, at, torch.full_like(at, int(distance), dtype=x.dtype))
    return problem


def trained(confidence: float) -> Problem:
    """Blanks, but for a frame of each symbol."""
    problem = random_problem([60, 50], [15, 12], 200, 1.0)
    problem.am[:, :, 0] += confidence
    for n in range(2):
        frames, symbols = int(problem.logit_lengths[n]), int(problem.target_lengths[n])
        for u in range(symbols):
            y = problem.targets[n, u]
            problem.am[n, (2 * u + 1) * frames // (2 * symbols), y] += 1.6 * confidence
            problem.lm[n, u, y] += 0.3 * confidence
    return problem


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "small": lambda: random_problem([19, 23, 8], [6, 9, 3], 33, 1.0),
    "small, wide range": lambda: random_problem([19, 23, 8], [6, 9, 3], 33, 3.0),
    "V 500": lambda: random_problem([60, 50, 30], [15, 11, 7], 500, 4.0),
    "V 5000": lambda: random_problem([30, 20], [8, 5], 5000, 1.0),
    "peaks 20": lambda: peaked(20),
    "peaks 90": lambda: peaked(90),
    "trained": lambda: trained(6),
    "well trained": lambda: trained(12),
}
every_problem = pytest.mark.parametrize("name", PROBLEMS)
both_types = pytest.mark.parametrize("dtype", LIMITS, ids=str)
Loss = Callable[[Problem], Tensor]


def gradients(loss: Loss, problem: Problem) -> list[Tensor]:
    leaves = [x.requires_grad_() for x in problem[:2]]
    grads = torch.autograd.grad(loss(Problem(*leaves, *problem[2:])), leaves)
    return [x.double().cpu() for x in grads]


def check(loss: Loss, problem: Problem, dtype: torch.dtype, device: str, exact: Loss) -> None:
    rounded = problem.to("cpu", dtype)
    wanted = gradients(exact, rounded.to("cpu", torch.float64))
    got = gradients(loss, rounded.to(device, dtype))
    for x, y in zip(got, wanted, strict=True):
        unit = (y.to(dtype).double() - y).norm()
        assert (x - y).norm() < LIMITS[dtype] * unit


def of_scales(lm_only_scale: float, am_only_scale: float) -> Loss:
    def loss(problem: Problem) -> Tensor:
        scales = {"lm_only_scale": lm_only_scale, "am_only_scale": am_only_scale}
        return pruned_rnnt.rnnt_loss_simple(*problem, **scales, reduction="sum").loss

    return loss


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("scales", [(0.0, 0.0), (0.25, 0.0), (0.2, 0.3)], ids=str)
@both_types
@every_problem
def test_gradients(name, dtype, scales, device) -> None:
    loss = of_scales(*scales)
    check(loss, PROBLEMS[name](), dtype, device, loss)


@pytest.fixture(params=[1, 1 << 30], ids=["one by one", "together"])
def stored_in_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of CUDA, in plain torch on the CPU; of one utterance after the other, or of all."""
    layout = simple_products.ExpLayout(torch.bfloat16, True, 8)
    unsplit = simple_loss.exp_layout
    monkeypatch.setattr(simple_products, "TOGETHER_BYTES", request.param)
    monkeypatch.setattr(
        simple_loss,
        "exp_layout",
        lambda dtype, device: unsplit(dtype, device) if dtype == torch.float64 else layout,
    )
    ops = ("exp_rows", "simple_product", "simple_log_probs", "simple_weights", "simple_sums")
    for op in (*ops, "simple_backward"):
        monkeypatch.setattr(simple_loss, op, getattr(simple_loss, op).__wrapped__)


@pytest.mark.usefixtures("stored_in_parts")
@pytest.mark.parametrize("scales", [(0.25, 0.0), (0.2, 0.3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *LIMITS], ids=str)
@every_problem
def test_products_of_parts(name, dtype, scales) -> None:
    loss, problem = of_scales(*scales), PROBLEMS[name]()
    if dtype in LIMITS:
        check(loss, problem, dtype, "cpu", loss)
        return
    # Of float32, 16 bits at least.
    rounded = problem.to("cpu", dtype)
    wanted = gradients(loss, rounded.to("cpu", torch.float64))
    for x, y in zip(gradients(loss, rounded), wanted, strict=True):
        assert (x - y).norm() < 1e-4 * y.norm()


def tdt(problem: Problem) -> Tensor:
    am, lm, *batch = problem
    durations = [x.new_zeros((*x.shape[:2], len(DURATIONS))) for x in (am, lm)]
    options = {"durations": DURATIONS, "lm_only_scale": 0.25, "reduction": "sum"}
    return simple_tdt_loss(am, lm, *durations, *batch, **options).loss


@pytest.mark.parametrize("device", cases.DEVICES)
@both_types
@pytest.mark.parametrize("name", ["small", "peaks 90", "trained", "well trained"])
def test_tdt(name, dtype, device) -> None:
    check(tdt, PROBLEMS[name](), dtype, device, tdt)


def of_module(problem: Problem) -> Tensor:
    """The simple loss of a module whose projections change nothing."""
    am, lm, *batch = problem
    size = am.shape[2]
    torch.manual_seed(8)
    module = pruned_rnnt.PrunedTransducerLoss(
        pruned_rnnt.Joiner(size, size, 8, size),
        *(size, size, size),
        s_range=3,
        reduction="sum",
        warm_up_steps=10,
        pruned_scale_start=0.0,
    )
    with torch.no_grad():
        for layer in (module.simple_am_proj, module.simple_lm_proj):
            layer.weight.copy_(torch.eye(size))
            layer.bias.zero_()
    module.to(am.device, am.dtype)
    return module(am, lm, *batch, step=0).loss


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("streamed", [False, True], ids=["stored", "streamed"])
@both_types
@pytest.mark.parametrize("name", ["small", "small, wide range", "trained", "well trained"])
def test_module(name, dtype, streamed, device, monkeypatch) -> None:
    monkeypatch.setattr(streamed_loss, "MOST_STORED_BYTES", 0 if streamed else 1 << 40)
    monkeypatch.setattr(streamed_loss, "_TILE_BYTES", 1)
    monkeypatch.setattr(streamed_loss, "_LEAST_COLUMNS", 16)
    check(of_module, PROBLEMS[name](), dtype, device, of_scales(0.25, 0.0))
