"""Activations, masks, and branches of a layer, against reference computations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pruned_rnnt.model.zipformer.activation import (
    Kind,
    Swoosh,
    SwooshLinear,
    swoosh,
)
from pruned_rnnt.model.zipformer.layer import (
    NO_MASKS,
    dropout_mask,
    keep_mask,
    sample_layer_masks,
)
from pruned_rnnt.model.zipformer.residual import Bypass, add_branch, begin_stream
from pruned_rnnt.model.zipformer.schedule import Clock
from tests.model.zipformer_tiny import randoms


@pytest.mark.parametrize(("kind", "shift", "offset"), [("L", 4.0, 0.035), ("R", 1.0, 0.313261687)])
def test_swoosh_values_and_gradients(kind: Kind, shift: float, offset: float) -> None:
    x = torch.linspace(-30, 60, 91, dtype=torch.float64)
    expected = [math.log1p(math.exp(v - shift)) - 0.08 * v - offset for v in x.tolist()]
    torch.testing.assert_close(swoosh(x, kind), torch.tensor(expected, dtype=x.dtype))
    leaf = randoms(3, 5).mul(4).requires_grad_()
    assert torch.autograd.gradcheck(Swoosh(kind), leaf)
    assert swoosh(x.half(), kind).dtype == torch.float16


@pytest.mark.parametrize("kind", ["L", "R"])
@pytest.mark.parametrize("dropout", [None, 0.4])
def test_swoosh_linear_equals_separate_ops(kind: Kind, dropout: float | None) -> None:
    layer = SwooshLinear(6, 4, kind, initial_scale=0.5).double()
    x, upstream = randoms(2, 7, 6).mul(3).requires_grad_(), randoms(2, 7, 4, seed=1)
    torch.manual_seed(3)
    mask = dropout_mask(2, 6, dropout, x.device)
    assert (mask is None) == (dropout is None)
    out = layer(x, mask)
    hidden = swoosh(x, kind) if mask is None else swoosh(x, kind) * mask
    expected = nn.functional.linear(hidden, layer.weight, layer.bias)
    torch.testing.assert_close(out, expected)
    leaves = (x, layer.weight, layer.bias)
    for got, want in zip(
        torch.autograd.grad(out, leaves, upstream),
        torch.autograd.grad(expected, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, mask), expected)


@pytest.mark.parametrize("kind", ["L", "R"])
def test_swoosh_in_bfloat16_is_rounded_once(kind: Kind) -> None:
    """Also for large x, where a difference of large terms could lose precision."""
    x = torch.linspace(-60, 80, 561).bfloat16().requires_grad_()
    twin = x.detach().double().requires_grad_()
    activated, expected = Swoosh(kind)(x), swoosh(twin, kind)
    torch.testing.assert_close(activated, expected.bfloat16(), rtol=4e-3, atol=1e-6)
    activated.sum().backward()
    expected.sum().backward()
    assert x.grad is not None
    assert twin.grad is not None
    torch.testing.assert_close(x.grad, twin.grad.bfloat16(), rtol=4e-3, atol=1e-6)


def test_dropout_mask_and_keep_mask() -> None:
    x = torch.zeros(400, 3, 2)
    torch.manual_seed(0)
    dropped = dropout_mask(400, 2, 0.25, x.device)
    assert dropped is not None
    assert dropped.shape == (400, 1, 2)
    torch.testing.assert_close(dropped.unique(), torch.tensor([0.0, 4 / 3]))
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.1)
    assert dropout_mask(400, 2, None, x.device) is None
    kept = keep_mask(x, 0.25)
    assert kept is not None
    assert kept.shape == (400, 1, 1)
    assert kept.mean().item() == pytest.approx(0.75, abs=0.08)
    assert keep_mask(x, None) is None


def test_layer_masks_have_the_requested_rates() -> None:
    torch.manual_seed(0)
    skips = [(0.0, 0.5, 0.0, 0.1, 0.0, 1.0), (0.9, 0.0, 0.0, 0.0, 0.2, 0.0)]
    widths = [(2, 3, 4), (5, 6, 7)]
    masks = sample_layer_masks(Clock(), skips, widths, 0.5, torch.zeros(500, 8, 2))
    for of_layer, rates, hidden_widths in zip(masks, skips, widths, strict=True):
        for mask, rate in zip(of_layer[:6], rates, strict=True):
            assert (mask is None) == (rate == 0.0)
            if mask is not None:
                assert mask.shape == (500, 1, 1)
                assert mask.mean().item() == pytest.approx(1 - rate, abs=0.07)
        for hidden, width in zip(of_layer[6:], hidden_widths, strict=True):
            assert hidden is not None
            assert hidden.shape == (500, 1, width)
            assert hidden.unique().tolist() == [0.0, 2.0]
    none = [(0.0,) * 6] * 2
    nothing = sample_layer_masks(Clock(), none, widths, 0.0, torch.zeros(5, 8, 2))
    assert nothing == [NO_MASKS] * 2


def test_branch_and_bypass_with_skipped_sequences() -> None:
    x, branch, keep = randoms(3, 4, 2), randoms(3, 4, 2, seed=1), torch.tensor([1.0, 0.0, 1.0])
    leaves = (x.requires_grad_(), branch.requires_grad_())
    keep_N11 = keep.double().view(3, 1, 1)
    total, reader = add_branch(x, branch, keep_N11)
    assert reader is total
    torch.testing.assert_close(total, x + keep_N11 * branch)
    assert torch.autograd.gradcheck(lambda a, b: add_branch(a, b, keep_N11)[0], leaves)
    bypass = Bypass(Clock(), 2).double().eval()
    for kept in (None, keep_N11):
        scale = bypass.bypass_scale if kept is None else bypass.bypass_scale * kept
        torch.testing.assert_close(bypass(x, branch, kept), x + (branch - x) * scale)
        assert torch.autograd.gradcheck(
            lambda a, b, scale, kept=kept: torch.func.functional_call(
                bypass, {"bypass_scale": scale}, (a, b, kept)
            ),
            (*leaves, bypass.bypass_scale),
        )


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("read", [True, False])
def test_residual_stream_under_autocast(kept: bool, read: bool) -> None:
    x, branch = (randoms(3, 4, 2, seed=seed).float().requires_grad_() for seed in (0, 1))
    low_branch = branch.bfloat16()
    keep = torch.tensor([1.0, 0.0, 1.0]).view(3, 1, 1) if kept else None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        begin, *readers = begin_stream(x, readers=2)
        total, reader = add_branch(begin, low_branch, keep, read=read)
    assert [part.dtype for part in (begin, *readers)] == [torch.float32] + 2 * [torch.bfloat16]
    assert reader.dtype == (torch.bfloat16 if read else torch.float32)
    scale = 1.0 if keep is None else keep
    expected = x + low_branch * scale
    assert torch.equal(total, expected)
    assert torch.equal(reader, expected.to(reader.dtype))
    # These gradients are exact in bfloat16, and so are their sums.
    (total + 2.0 * reader + 4.0 * readers[0] + 8.0 * readers[1]).sum().backward()
    assert x.grad is not None
    assert branch.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 15.0))
    assert torch.equal(branch.grad, torch.full_like(branch, 3.0) * scale)
