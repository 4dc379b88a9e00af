"""Modules with custom gradients, each against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pruned_rnnt.model.zipformer import gradient, scores
from pruned_rnnt.model.zipformer.balancer import Balancer
from pruned_rnnt.model.zipformer.norm import BiasNorm
from pruned_rnnt.model.zipformer.schedule import Clock
from pruned_rnnt.model.zipformer.whiten import Whiten, update_probabilities
from tests.model.zipformer_tiny import randoms

BALANCERS = [
    {},
    {"min_positive": 0.45, "max_positive": 0.55, "min_abs": 0.2, "max_abs": 4.0},
    {"min_positive": 0.3, "max_positive": 1.0, "min_abs": 0.75, "max_abs": 5.0},
]


@pytest.mark.parametrize("limits", BALANCERS)
@pytest.mark.parametrize("axis", [-1, 1])
def test_balancer_adds_the_gradient_of_its_penalty(limits: dict[str, float], axis: int) -> None:
    scales = torch.tensor([0.01, 0.1, 1.0, 3.0, 10.0, 1.0], dtype=torch.float64)
    means = torch.tensor([0.0, 1.0, -3.0, 0.3, 0.0, 0.1], dtype=torch.float64)
    x_NTC, upstream = randoms(5, 9, 6) * scales + means, randoms(5, 9, 6, seed=1)
    balancer = Balancer(Clock(), channel_axis=axis, probability=1.0, **limits)
    leaf = x_NTC.transpose(axis, -1).clone().requires_grad_()
    out = balancer(leaf)
    assert torch.equal(out, leaf)
    out.backward(upstream.transpose(axis, -1))

    full = {"min_positive": 0.05, "max_positive": 0.95, "min_abs": 0.2, "max_abs": 100.0} | limits
    low, high = (
        0.8139535143 * math.atanh(min(2 * full[name] - 1, 1 - 5e-11))
        for name in ("min_positive", "max_positive")
    )
    twin = x_NTC.clone().requires_grad_()
    mean, power = twin.mean(dim=(0, 1)), twin.square().mean(dim=(0, 1))
    ratio, rms = mean / (power - mean**2).sqrt(), power.sqrt()
    to_rms = math.sqrt(math.pi / 2)
    clamped = rms.clamp(to_rms * full["min_abs"], to_rms * full["max_abs"])
    penalty = (ratio - ratio.clamp(low, high)).abs() + (clamped / rms).log().abs()
    (push,) = torch.autograd.grad(penalty.sum(), twin)
    size = push.square().mean(dim=(0, 1)).sqrt()
    push = torch.where(size > 0, push / size, 0.0)
    assert leaf.grad is not None
    torch.testing.assert_close(
        leaf.grad.transpose(axis, -1), upstream + upstream.abs() * 0.04 * push
    )
    assert (size > 0).sum() >= 2


def test_balancer_upper_half() -> None:
    x, upstream = randoms(5, 9, 6).add(1.0), randoms(5, 9, 6, seed=1)
    grads = []
    for upper_half, channels in ((True, slice(None)), (False, slice(3, None))):
        balancer = Balancer(Clock(), upper_half=upper_half, min_abs=2.0, probability=1.0)
        leaf = x[..., channels].clone().requires_grad_()
        balancer(leaf).backward(upstream[..., channels])
        assert leaf.grad is not None
        grads.append(leaf.grad)
    assert torch.equal(grads[0][..., :3], upstream[..., :3])
    torch.testing.assert_close(grads[0][..., 3:], grads[1])
    assert not torch.equal(grads[1], upstream[..., 3:])


def test_balancer_gradient_of_constant_channel_is_finite() -> None:
    leaf = torch.zeros(4, 3).index_fill_(1, torch.tensor([1]), 2.0).requires_grad_()
    Balancer(Clock(), probability=1.0)(leaf).backward(torch.ones(4, 3))
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("limit", [1.5, 100.0])
def test_whiten_adds_the_gradient_of_its_metric(groups: int, limit: float) -> None:
    scales = torch.tensor([0.1, 0.5, 1.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    x, upstream = randoms(4, 11, 6) * scales + 0.5, randoms(4, 11, 6, seed=1)
    whiten = Whiten(Clock(), limit, strength=0.1, groups=groups)
    whiten.probability = 1.0
    leaf = x.clone().requires_grad_()
    whiten(leaf).backward(upstream)

    twin = x.clone().requires_grad_()
    total, diagonal = 0.0, 0.0
    for group in twin.flatten(0, 1).chunk(groups, dim=1):
        centred = group - group.mean(dim=0)
        scatter = centred.t() @ centred
        total = total + (scatter @ scatter).trace()
        diagonal = diagonal + scatter.trace()
    metric = (total / 6) / (diagonal / 6) ** 2
    (push,) = torch.autograd.grad(metric, twin)
    expected = upstream
    if metric > limit:
        expected = upstream + push * (0.1 * upstream.norm() / push.norm())
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, expected)
    assert bool(whiten.over_limit) == bool(metric > limit) == (limit == 1.5)


def test_whiten_runs_more_often_while_over_its_limit() -> None:
    within, over = Whiten(Clock(), 2.0), Whiten(Clock(), 2.0)
    within.over_limit.fill_(False)
    update_probabilities([within, over])
    assert (within.probability, over.probability) == (0.025, 0.25)
    assert "over_limit" in over.state_dict()


def test_bias_norm_values_and_gradients() -> None:
    norm = BiasNorm(Clock(), 5).double()
    norm.bias.data = randoms(5, seed=2)
    norm.eval()
    x = randoms(2, 3, 5)
    size = (x - norm.bias).square().mean(dim=-1, keepdim=True).sqrt()
    torch.testing.assert_close(norm(x), x / size * norm.log_scale.exp())
    leaves = (x.requires_grad_(), norm.bias, norm.log_scale)
    assert torch.autograd.gradcheck(
        lambda x, bias, scale: torch.func.functional_call(
            norm, {"bias": bias, "log_scale": scale}, (x,)
        ),
        leaves,
    )


@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("with_positions", [True, False])
def test_masked_softmax_equals_torch(with_positions: bool, past: int) -> None:
    count = 4
    seen = past + count
    content = randoms(2, 3, count, seen).requires_grad_()
    query = randoms(2, count, 3 * 2, seed=1).requires_grad_()
    positions = randoms(3, 2, seen + count, seed=2).requires_grad_()
    leaves = (content, query, positions) if with_positions else (content,)
    blocked = torch.zeros(2, 1, 1, seen, dtype=torch.bool)
    blocked[0, ..., 1:3] = True
    blocked[1] = True
    # Column s - (S - T) - t + S of row t.
    columns_TS = torch.arange(seen) - past - torch.arange(count)[:, None] + seen

    def plainly(
        content: Tensor, query: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        if query is not None:
            by_distance = torch.einsum("nthp,hpr->nhtr", query.unflatten(-1, (3, 2)), positions)
            content = content + by_distance.gather(-1, columns_TS.expand_as(content))
        return torch.where(blocked, -1000.0, content).softmax(dim=-1)

    more = scores.ByPosition(query, positions) if with_positions else None
    got = scores.masked_softmax(content, more, blocked).one_NHTS
    torch.testing.assert_close(got, plainly(*leaves))
    assert (got[0, ..., 1:3] == 0.0).all()
    upstream = randoms(2, 3, count, seen, seed=9)
    for one, other in zip(
        torch.autograd.grad(got, leaves, upstream),
        torch.autograd.grad(plainly(*leaves), leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        again = scores.masked_softmax(content, more, blocked)
        torch.testing.assert_close(again.other_NHTS, got)
        torch.testing.assert_close(again.first_NTS, got[:, 0])
    low = content.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = scores.masked_softmax(low, None, blocked).one_NHTS
    assert weights.dtype == torch.bfloat16
    torch.testing.assert_close(weights, plainly(low.double()).bfloat16(), rtol=8e-3, atol=1e-6)


def test_limit_gradients() -> None:
    clock = Clock()
    clock.bernoulli = lambda probability: probability > 0  # type: ignore[method-assign]
    value = torch.tensor([0.1, 0.1, 0.5, 0.5, 1.2, 1.2])
    upstream = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    limits = gradient.sample_limits(clock, 0.2, 1.0)
    limited = gradient.grad_towards_limits(upstream, value, limits)
    assert limited.tolist() == [-1.0, -1.0, 1.0, -1.0, 1.0, 1.0]
    assert gradient.grad_towards_limits(upstream, value, None) is upstream
    large = torch.tensor([-30.0, -20.0, 20.0, 30.0]).view(1, 1, 1, 4).requires_grad_()
    # The penalty is as large as the mean gradient at any scale of the loss.
    nothing = scores.ByPosition(torch.zeros(1, 1, 1), torch.zeros(1, 1, 5))
    for scale, more in ((1.0, None), (1e-6, None), (1.0, nothing)):
        large.grad = None
        sums, rest, switch = scores.limit_scores(large, more, clock)
        assert rest is None
        assert switch is None
        sums.backward(scale * torch.tensor([0.0, 1.0, -3.0, 0.0]).view_as(large))
        assert large.grad is not None
        pushed = large.grad.flatten() / scale
        torch.testing.assert_close(pushed, torch.tensor([-1.0, 1.0, -3.0, 1.0]))
    scaled = torch.ones(2, requires_grad=True)
    gradient.ScaleGradient(0.2)(scaled).sum().backward()
    assert scaled.grad is not None
    torch.testing.assert_close(scaled.grad, torch.full((2,), 0.2))
