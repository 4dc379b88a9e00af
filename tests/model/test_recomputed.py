"""Values that the backward pass computes again: the same gradients, in less memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from pruned_rnnt.model import recomputed as module
from pruned_rnnt.model import subsampling_convolutions
from pruned_rnnt.model.recomputed import recomputed
from pruned_rnnt.model.zipformer import embedding
from tests.model.zipformer_tiny import TINY, ragged_batch, sine_encoder


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        product: Tensor = 2 * ctx.saved_tensors[0] * grad
        return product


def squares(*several: Tensor) -> list[Any]:
    return [_Square.apply(x) for x in several]  # type: ignore[no-untyped-call]


def set_active(monkeypatch: pytest.MonkeyPatch, active: bool) -> None:
    monkeypatch.setattr(
        module, "train_with_kernels", lambda *tensors: active and torch.is_grad_enabled()
    )


def memories(tensors: Iterable[Tensor]) -> list[int]:
    return [x.untyped_storage().data_ptr() for x in tensors]


@pytest.mark.parametrize("active", [False, True])
def test_value_and_its_views_are_computed_again(
    active: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_active(monkeypatch, active)
    torch.manual_seed(0)
    numbers = torch.randn(3, 4)
    value, other = numbers.clone().requires_grad_(), torch.randn(5, requires_grad=True)
    calls = 0

    def again() -> Tensor:
        nonlocal calls
        calls += 1
        assert not torch.is_grad_enabled()
        return numbers.clone()

    with recomputed(value, again):
        part, turned, unrelated = squares(value[:, 1:], value.t(), other)
    # Each is computed once for both views, in every backward pass.
    total = part.sum() + turned.cos().sum() + unrelated.sum()
    for passes in (1, 2):
        of_value, of_other = torch.autograd.grad(total, (value, other), retain_graph=True)
        expected = -2 * numbers * (numbers * numbers).sin()
        expected[:, 1:] += 2 * numbers[:, 1:]
        torch.testing.assert_close(of_value, expected)
        torch.testing.assert_close(of_other, 2 * other)
        assert calls == (passes if active else 0)
    kept = memories(x for result in (part, turned) for x in result.grad_fn.saved_tensors)
    assert (memories([value])[0] in kept) == (not active)
    assert memories(unrelated.grad_fn.saved_tensors) == memories([other])


def test_without_gradients_nothing_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    set_active(monkeypatch, True)
    with torch.no_grad(), recomputed(torch.ones(2), lambda: pytest.fail("was called")):
        (result,) = squares(torch.ones(2))
    assert result.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_gradients_of_an_encoder_stay_the_same(
    precision: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, in the layout of a GPU."""
    for part in (embedding, subsampling_convolutions):
        monkeypatch.setattr(part, "should_avoid_cudnn_replanning", lambda x: True)
    features, lengths, _ = ragged_batch([90, 61])
    results = []
    for active in (False, True):
        set_active(monkeypatch, active)
        encoder = sine_encoder(TINY).train()
        encoder.set_step(5000)
        torch.manual_seed(3)
        low = precision == torch.bfloat16
        with torch.autocast("cpu", precision, enabled=low):
            encoded, _ = encoder(features, lengths)
        encoded.float().square().mean().backward()
        results.append([encoded, *(p.grad for p in encoder.parameters())])
    for plain, again in zip(*results, strict=True):
        assert torch.equal(plain, again)
