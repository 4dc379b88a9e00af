"""rnnt_loss_tdt_fused against rnnt_loss_tdt of stored logits, over chunks, layouts and dtypes."""

from functools import partial

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt import Bounds
from pruned_rnnt.ops.joiner import fused_joiner
from tests.loss import loss_cases as cases
from tests.loss.tdt_cases import DURATIONS

WIDTH = 12
PLACES = [
    ("cpu", "cpu"),
    pytest.param("cuda", "cuda", marks=pytest.mark.gpu),
    pytest.param("cuda", "cpu", marks=pytest.mark.gpu),
]
# Bytes of workspace: one chunk, several chunks, one frame per chunk.
WORKSPACES = [64 << 20, 3000, 1]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(29)


def layers_of(batch: cases.Batch, count: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """am, lm, and the output layers of tokens and durations."""
    shapes = [
        (batch.size, batch.frames, WIDTH),
        (batch.size, batch.symbols + 1, WIDTH),
        (batch.vocabulary, WIDTH),
        (batch.vocabulary,),
        (count, WIDTH),
        (count,),
    ]
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def band_of(batch: cases.Batch) -> Bounds:
    start = (torch.arange(batch.frames) // 2).clamp_max(
        (torch.tensor(batch.symbols_N)[:, None] - 2).clamp_min(0)
    )
    return Bounds(start.int(), 3)


def stored_loss(batch: cases.Batch, tensors, bounds: Bounds | None, **options) -> Tensor:
    am, lm, weight, bias, duration_weight, duration_bias = tensors
    if bounds is None:
        hidden = torch.tanh(am[:, :, None] + lm[:, None])
    else:
        am_p, lm_p = pruned_rnnt.prune(am, lm, bounds)
        hidden = torch.tanh(am_p + lm_p)
    logits = hidden @ weight.T + bias
    durations = hidden @ duration_weight.T + duration_bias
    arguments = (logits, durations, batch.targets, *batch.lengths("cpu"))
    return pruned_rnnt.rnnt_loss_tdt(*arguments, bounds=bounds, reduction="none", **options)


fused_loss = partial(cases.loss_on_device, pruned_rnnt.rnnt_loss_tdt_fused)


@pytest.mark.parametrize(("device", "lengths_on"), PLACES)
@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("banded", [True, False], ids=["band", "full"])
@pytest.mark.parametrize(
    ("vocabulary", "options"),
    [(13, {}), (16, {"fastemit_lambda": 0.3, "sigma": 0.1}), (11, {"clamp": 0.05})],
    ids=["13", "16", "11"],
)
def test_equals_the_loss_of_stored_logits(
    vocabulary, options, banded, workspace, device, lengths_on, monkeypatch
) -> None:
    monkeypatch.setattr(fused_joiner, "WORKSPACE_BYTES", workspace)
    batch = cases.make_batch([9, 11, 4], [4, 6, 0], vocabulary, 0)
    tensors = layers_of(batch, 5)
    bounds = band_of(batch) if banded else None
    expected = stored_loss(batch, tensors, bounds, **options)
    loss = fused_loss(batch, tensors, bounds, device, lengths_on, **options)
    # Twice: the second pass computes the last chunk again.
    for _ in range(2):
        cases.assert_same_loss_and_gradients(loss, expected, batch.upstream(), *tensors)


@pytest.mark.parametrize("durations", DURATIONS, ids=str)
def test_every_table(durations) -> None:
    batch = cases.make_batch([9, 11, 4], [4, 6, 0], 13, 0)
    tensors = layers_of(batch, len(durations))
    expected = stored_loss(batch, tensors, None, durations=durations)
    loss = fused_loss(batch, tensors, None, "cpu", durations=durations)
    cases.assert_same_loss_and_gradients(loss, expected, batch.upstream(), *tensors)


@pytest.mark.parametrize("device", cases.DEVICES)
@cases.tolerances(float32=1e-4, float16=1e-2, bfloat16=8e-2)
def test_dtypes(dtype, tolerance, device) -> None:
    batch = cases.make_batch([19, 23, 8], [6, 9, 3], 33, 0)
    tensors = [x.detach().mul(0.3).to(dtype) for x in layers_of(batch, 5)]
    wide = [x.double().requires_grad_() for x in tensors]
    given = [x.to(device).requires_grad_() for x in tensors]
    expected = stored_loss(batch, wide, None)
    loss = fused_loss(batch, given, None, device)
    cases.assert_near_float64(loss, expected, batch.upstream(), given, wide, tolerance)


@pytest.mark.parametrize("device", cases.DEVICES)
def test_omega_is_the_fused_rnnt_loss(device) -> None:
    batch = cases.make_batch([9, 7], [4, 3], 16, 0)
    am, lm, weight, bias, *durations = layers_of(batch, 5)
    moved = [x.to(device) for x in (am, lm, weight, bias)]
    rest = (batch.targets.to(device), None, *batch.lengths("cpu"))
    expected = pruned_rnnt.rnnt_loss_fused(*moved, *rest)
    loss = pruned_rnnt.rnnt_loss_tdt_fused(
        *moved, *(x.to(device) for x in durations), *rest, omega=1.0, sigma=0.3
    )
    torch.testing.assert_close(loss, expected)
    grads = torch.autograd.grad(loss, [am, *durations])
    torch.testing.assert_close(grads[0], torch.autograd.grad(expected, am)[0])
    assert not any(grad.any() for grad in grads[1:])


def test_duration_layer_must_fit_the_durations() -> None:
    batch = cases.make_batch([5, 4], [2, 1], 13, 0)
    tensors = layers_of(batch, 4)
    with pytest.raises(ValueError, match=r"duration_weight has shape \(4, 12\).* = \(5, 12\)"):
        fused_loss(batch, tensors, None, "cpu")
