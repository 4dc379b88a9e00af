"""The pruned TDT loss as one compiled step, on CUDA, against its composition of layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pruned_rnnt.ops.joiner import fused_joiner
from tests.loss.step_cases import STEP, assert_same, inputs, modules, results, sized_step

DURATIONS = (0, 1, 2, 3, 4)
TABLES = [DURATIONS, (1, 2, 4), (0, 1, 2, 3, 4, 5, 6, 7, 12), (1, 0), (1,)]
DEVICES = ["cpu", *STEP]


@pytest.mark.parametrize("device", STEP)
@pytest.mark.parametrize("vocabulary", [24, 29])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("what", ["total", "simple", "pruned", "all"])
def test_equals_composition(device, vocabulary, reduction, what) -> None:
    options = {"durations": DURATIONS, "sigma": 0.05, "reduction": reduction}
    step, composition = modules(device, vocabulary, torch.float64, **options)
    batch = inputs(device, vocabulary, torch.float64)
    got, wanted = results(step, batch, what), results(composition, batch, what)
    assert_same(got, wanted, 1e-10, 1e-10)


@pytest.mark.parametrize("device", STEP)
@pytest.mark.parametrize(
    "options",
    [
        {"fastemit_lambda": 0.2, "exact_bounds": True},
        {"delay_penalty": 0.1, "lm_only_scale": 0.0},
        {"lm_only_scale": 0.2, "am_only_scale": 0.3},
        {"blank": -1, "sigma": 0.02},
    ],
    ids=str,
)
@pytest.mark.parametrize("durations", TABLES, ids=str)
def test_options_equal_composition(device, durations, options) -> None:
    step, composition = modules(device, 21, torch.float64, durations=durations, **options)
    batch = list(inputs(device, 21, torch.float64))
    batch[2] = batch[2].clamp(max=19)
    assert_same(results(step, batch, "total"), results(composition, batch, "total"), 1e-9, 1e-9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-4), (torch.float16, 4e-2), (torch.bfloat16, 2e-1)],
    ids=str,
)
def test_dtypes(device, dtype, tolerance) -> None:
    step, _ = modules(device, 29, dtype, durations=DURATIONS)
    _, exact = modules("cpu", 29, torch.float64, durations=DURATIONS)
    with torch.no_grad():
        for left, right in zip(exact.parameters(), step.parameters(), strict=True):
            left.copy_(right.cpu().double())
    batch = inputs(device, 29, dtype)
    wide = [x.detach().cpu().double().requires_grad_() for x in batch[:2]]
    wanted = results(exact, (*wide, batch[2].cpu(), *batch[3:]), "total")
    got = [x.cpu() for x in results(step, batch, "total")]
    for left, right in zip(got[:3], wanted[:3], strict=True):
        torch.testing.assert_close(left.double(), right, rtol=tolerance, atol=tolerance)
    # What rounds to another band would have other gradients.
    assert torch.equal(got[7], wanted[7])
    for left, right in zip(got[8:], wanted[8:], strict=True):
        scale = right.abs().max().item()
        torch.testing.assert_close(left.double(), right, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("device", STEP)
def test_autocast_gives_gradients_in_the_parameters_dtype(device) -> None:
    step, composition = modules(device, 29, torch.float32, durations=DURATIONS)
    batch = inputs(device, 29, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        got, wanted = results(step, batch, "total"), results(composition, batch, "total")
    for left, right in zip(got, wanted, strict=True):
        assert left.dtype == right.dtype
        scale = right.abs().max().item()
        torch.testing.assert_close(left.double(), right.double(), rtol=0, atol=3e-2 * scale + 1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_second_backward_and_frozen_parameters(device) -> None:
    step, composition = modules(device, 24, torch.float64, durations=DURATIONS)
    batch = inputs(device, 24, torch.float64)
    loss = step(*batch, step=4).loss
    first = torch.autograd.grad(loss, list(step.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(step.parameters()))
    assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))
    for module in (step, composition):
        module.tdt.requires_grad_(False)
        module.joiner.duration_linear.requires_grad_(False)
        module(batch[0].detach(), *batch[1:], step=4).loss.backward()
    for left, right in zip(step.parameters(), composition.parameters(), strict=True):
        assert (left.grad is None) == (right.grad is None)
        if left.grad is not None:
            torch.testing.assert_close(left.grad, right.grad)


@pytest.mark.parametrize("device", STEP)
def test_without_gradients(device) -> None:
    step, composition = modules(device, 24, torch.float64, durations=DURATIONS)
    batch = inputs(device, 24, torch.float64)
    with torch.no_grad():
        got, wanted = step(*batch, step=4), composition(*batch, step=4)
    assert not got.loss.requires_grad
    torch.testing.assert_close(got.loss, wanted.loss)


@pytest.mark.parametrize("device", STEP)
@pytest.mark.parametrize("vocabulary", [8, 40, 500])
@pytest.mark.parametrize("workspace", [1, 1 << 30])
def test_chunks_and_hidden_gradients_in_pieces(device, vocabulary, workspace, monkeypatch) -> None:
    monkeypatch.setattr(fused_joiner, "WORKSPACE_BYTES", workspace)
    monkeypatch.setattr(fused_joiner, "_GRADIENT_BYTES", 1)
    sizes = (5, 40, 20, 8, 64, vocabulary)
    step, composition, batch = sized_step(device, sizes, 8, durations=DURATIONS)
    assert_same(results(step, batch, "all"), results(composition, batch, "all"), 1e-9, 1e-9)


@pytest.mark.parametrize("device", STEP)
@pytest.mark.parametrize("width", [5, 8, 13])
def test_widths_that_leave_rows_unaligned(device, width) -> None:
    step, composition, batch = sized_step(
        device, (3, 30, 40, width, width, 21), 4, durations=DURATIONS
    )
    assert_same(results(step, batch, "all"), results(composition, batch, "all"), 1e-9, 1e-9)


@pytest.mark.parametrize("device", STEP)
def test_lengths_on_the_device(device) -> None:
    step, composition, batch = sized_step(device, (3, 14, 6, 8, 8, 12), 4, durations=DURATIONS)
    wanted = results(composition, batch, "all")
    batch[3:] = [x.to(device) for x in batch[3:]]
    assert_same(results(step, batch, "all"), wanted, 1e-9, 1e-9)


@pytest.mark.gpu
def test_a_captured_step_equals_an_eager_one() -> None:
    step, _, batch = sized_step("cuda", (3, 14, 6, 8, 8, 12), 4, durations=DURATIONS)
    batch[3:] = [x.cuda() for x in batch[3:]]

    def numbers() -> list[Tensor]:
        loss = step(*batch, step=4).loss
        return [loss, *torch.autograd.grad(loss, batch[:2])]

    expected = [x.detach().clone() for x in numbers()]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        numbers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = numbers()
    graph.replay()
    for got, want in zip(captured, expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
def test_omega_uses_the_composition() -> None:
    """A call that draws RNN-T has the losses of a module whose layers are called one by one."""
    step, composition = modules("cuda", 24, torch.float64, durations=DURATIONS, omega=1.0)
    batch = inputs("cuda", 24, torch.float64)
    assert_same(results(step, batch, "all"), results(composition, batch, "all"), 1e-9, 1e-9)
