"""float32 against float64 on long input: TDT losses, occupancies and gradients stay accurate."""

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt import Bounds
from pruned_rnnt.ops.common.row_geometry import LatticeRows
from pruned_rnnt.ops.lattice.recursion import LossOptions, Recursion, run_recursion
from pruned_rnnt.ops.lattice.tdt_lattice import TdtOptions, TdtSums
from tests.loss.loss_cases import DEVICES

DURATIONS = [0, 1, 2, 3, 4]
MASS_ERROR = 1e-5
OCCUPANCY_ERROR = 1e-5
GRADIENT_ERROR = 1e-4


def relative_error(got: Tensor, exact: Tensor) -> float:
    return float((got.cpu().double() - exact).norm() / exact.norm())


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
def test_occupancies(kind, frames, symbols, device) -> None:
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
def test_gradients(columns, device) -> None:
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
