"""What only TDT has in the compiled step, on CUDA, against its composition of layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pruned_rnnt.ops.joiner import fused_joiner
from tests.loss.step_cases import (
    DURATIONS,
    STEP,
    assert_captured_equals_eager,
    assert_same,
    inputs,
    modules,
    results,
    sized_step,
)

TABLES = [DURATIONS, (1, 2, 4), (0, 1, 2, 3, 4, 5, 6, 7, 12), (1, 0), (1,)]


@pytest.mark.parametrize("device", STEP)
@pytest.mark.parametrize(
    "options",
    [
        {"fastemit_lambda": 0.2, "exact_bounds": True},
        {"delay_penalty": 0.1, "lm_only_scale": 0.0},
        {"lm_only_scale": 0.2, "am_only_scale": 0.3},
        {"blank": 20, "sigma": 0.02},
    ],
    ids=str,
)
@pytest.mark.parametrize("durations", TABLES, ids=str)
def test_options_equal_composition(device, durations, options) -> None:
    step, composition = modules(device, 21, torch.float64, durations=durations, **options)
    batch = list(inputs(device, 21, torch.float64))
    batch[2] = batch[2].clamp(max=19)
    assert_same(results(step, batch, "total"), results(composition, batch, "total"), 1e-9, 1e-9)


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


@pytest.mark.gpu
def test_a_captured_step_equals_an_eager_one() -> None:
    step, _, batch = sized_step("cuda", (3, 14, 6, 8, 8, 12), 4, durations=DURATIONS)
    batch[3:] = [x.cuda() for x in batch[3:]]

    def numbers() -> list[Tensor]:
        loss = step(*batch, step=4).loss
        return [loss, *torch.autograd.grad(loss, batch[:2])]

    assert_captured_equals_eager(numbers)


@pytest.mark.gpu
def test_omega_uses_the_composition() -> None:
    """A call that draws RNN-T has the losses of a module whose layers are called one by one."""
    step, composition = modules("cuda", 24, torch.float64, durations=DURATIONS, omega=1.0)
    batch = inputs("cuda", 24, torch.float64)
    assert_same(results(step, batch, "all"), results(composition, batch, "all"), 1e-9, 1e-9)
