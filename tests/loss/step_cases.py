"""Modules that take the compiled step on CUDA, their compositions, and batches for both."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import pruned_rnnt

STEP = [pytest.param("cuda", marks=pytest.mark.gpu)]
DEVICES = ["cpu", *STEP]
N, T, U, E, P, D = 3, 11, 5, 12, 10, 16
FRAMES, SYMBOLS = [11, 6, 9], [5, 3, 0]
DURATIONS = (0, 1, 2, 3, 4)
every_kind = pytest.mark.parametrize(
    "kind", [{}, {"durations": DURATIONS, "sigma": 0.05}], ids=["rnnt", "tdt"]
)


def composed(layer: torch.nn.Module) -> None:
    """A hook that does nothing makes the module call its layers one by one."""
    layer.register_forward_hook(lambda *_: None)


def modules(
    device: str, vocabulary: int, dtype: torch.dtype, **options
) -> tuple[pruned_rnnt.PrunedTransducerLoss, pruned_rnnt.PrunedTransducerLoss]:
    """The module that takes the step, and its composition."""
    both = []
    for _ in range(2):
        torch.manual_seed(3)
        count = len(options.get("durations") or ())
        joiner = pruned_rnnt.Joiner(E, P, D, vocabulary, duration_count=count)
        module = pruned_rnnt.PrunedTransducerLoss(
            joiner, E, P, vocabulary, s_range=3, warm_up_steps=10, **options
        )
        both.append(module.to(device, dtype))
    composed(both[1].simple_am_proj)
    return both[0], both[1]


def inputs(device: str, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(4)
    encoder, predictor = torch.randn(N, T, E), torch.randn(N, U + 1, P)
    targets = torch.randint(1, vocabulary, (N, U), dtype=torch.int32)
    leaves = [x.to(device, dtype).requires_grad_() for x in (encoder, predictor)]
    lengths = [torch.tensor(x, dtype=torch.int32) for x in (FRAMES, SYMBOLS)]
    return (*leaves, targets.to(device), *lengths)


def results(module: pruned_rnnt.PrunedTransducerLoss, batch: tuple, what: str) -> list[Tensor]:
    """The three losses, and the gradients of what is asked for."""
    losses = module(*batch, step=4)
    parts = {"total": losses.loss, "simple": losses.simple_loss, "pruned": losses.pruned_loss}
    parts["all"] = losses.loss + 0.3 * losses.simple_loss - 0.7 * losses.pruned_loss
    loss = parts[what]
    upstream = torch.linspace(0.5, 2.0, max(loss.numel(), 1), device=loss.device)
    leaves = [*batch[:2], *module.parameters()]
    grads = torch.autograd.grad(
        (loss.flatten() * upstream.to(loss)).sum(), leaves, allow_unused=True
    )
    zeroed = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
    numbers = [losses.loss, losses.simple_loss, losses.pruned_loss, *losses.occupancy]
    return [*numbers, losses.bounds.start, *zeroed]


def assert_same(got: list[Tensor], wanted: list[Tensor], rtol: float, atol: float) -> None:
    for left, right in zip(got, wanted, strict=True):
        assert left.dtype == right.dtype
        torch.testing.assert_close(left.double(), right.double(), rtol=rtol, atol=atol)


def assert_near(got: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    """Within a share of the largest number of each tensor."""
    for left, right in zip(got, wanted, strict=True):
        atol = tolerance * right.abs().max().item()
        torch.testing.assert_close(left.double(), right.double(), rtol=0, atol=atol)


def assert_captured_equals_eager(step: Callable[[], list[Tensor]]) -> None:
    expected = [x.detach().clone() for x in step()]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    graph.replay()
    for got, want in zip(captured, expected, strict=True):
        assert torch.equal(got, want)


def sized_step(
    device: str, sizes: tuple[int, int, int, int, int, int], s_range: int, **options
) -> tuple[pruned_rnnt.PrunedTransducerLoss, pruned_rnnt.PrunedTransducerLoss, list[Tensor]]:
    """The module, its composition and a ragged batch of N, T, U, E, D, V, all in float64."""
    batch, frames, symbols, width, dim, vocabulary = sizes
    both = []
    for _ in range(2):
        torch.manual_seed(5)
        count = len(options.get("durations") or ())
        joiner = pruned_rnnt.Joiner(width, width, dim, vocabulary, duration_count=count)
        dims = (width, width, vocabulary)
        both.append(pruned_rnnt.PrunedTransducerLoss(joiner, *dims, s_range=s_range, **options))
    composed(both[1].simple_am_proj)
    frames_N = torch.randint(frames // 2 + 1, frames + 1, (batch,))
    symbols_N = torch.randint(0, symbols + 1, (batch,))
    frames_N[0], symbols_N[0] = frames, symbols
    encoder, predictor = torch.randn(batch, frames, width), torch.randn(batch, symbols + 1, width)
    targets = torch.randint(1, vocabulary, (batch, symbols), dtype=torch.int32)
    leaves = [x.to(device, torch.float64).requires_grad_() for x in (encoder, predictor)]
    modules = [x.to(device, torch.float64) for x in both]
    return (*modules, [*leaves, targets.to(device), frames_N, symbols_N])
