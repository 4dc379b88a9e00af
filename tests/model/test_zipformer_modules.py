"""The parts, each against what it is defined by."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from pruned_rnnt.model.zipformer import gradient
from pruned_rnnt.model.zipformer.activation import (
    Kind,
    Swoosh,
    SwooshLinear,
    sequence_dropout_mask,
    swoosh,
)
from pruned_rnnt.model.zipformer.attention import AttentionWeights
from pruned_rnnt.model.zipformer.balancer import Balancer
from pruned_rnnt.model.zipformer.frames import Chunking, frames_at_rate, relative_positions
from pruned_rnnt.model.zipformer.layer import keep_mask
from pruned_rnnt.model.zipformer.norm import BiasNorm
from pruned_rnnt.model.zipformer.schedule import Clock, Schedule, chance, ramp
from pruned_rnnt.model.zipformer.stack import Downsample
from pruned_rnnt.model.zipformer.whiten import Whiten, refresh


def randoms(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


SCHEDULES = [
    (ramp(0.5, 0.1, 4000), [(-1, 0.5), (0, 0.5), (1000, 0.4), (4000, 0.1), (9999, 0.1)]),
    (ramp(0.5, 0.1, 20, begin=10), [(0, 0.5), (10, 0.5), (15, 0.3), (20, 0.1)]),
    (
        Schedule(((0, 0.2), (4000, 0.05), (16000, 0.0))),
        [(2000, 0.125), (4000, 0.05), (10000, 0.025), (20000, 0.0)],
    ),
]


@pytest.mark.parametrize(("schedule", "values"), SCHEDULES)
def test_schedules(schedule: Schedule, values: list[tuple[float, float]]) -> None:
    clock = Clock()
    for step, value in values:
        clock.step = step
        assert clock.read(schedule) == pytest.approx(value)
    assert clock.read(0.25) == 0.25


def test_chance() -> None:
    torch.manual_seed(1)
    assert not any(chance(0.0) for _ in range(9))
    assert all(chance(1.0) for _ in range(9))
    assert 0.2 < sum(chance(0.3) for _ in range(500)) / 500 < 0.4


@pytest.mark.parametrize(("kind", "shift", "offset"), [("L", 4.0, 0.035), ("R", 1.0, 0.313261687)])
def test_swoosh(kind: Kind, shift: float, offset: float) -> None:
    x = torch.linspace(-30, 60, 91, dtype=torch.float64)
    expected = [math.log1p(math.exp(v - shift)) - 0.08 * v - offset for v in x.tolist()]
    torch.testing.assert_close(swoosh(x, kind), torch.tensor(expected, dtype=x.dtype))
    leaf = randoms(3, 5).mul(4).requires_grad_()
    assert torch.autograd.gradcheck(Swoosh(kind), leaf)
    assert swoosh(x.half(), kind).dtype == torch.float16


@pytest.mark.parametrize("kind", ["L", "R"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_swoosh_linear_equals_its_three_steps(kind: Kind, dropout: float) -> None:
    layer = SwooshLinear(Clock(), 6, 4, kind, dropout, initial_scale=0.5).double()
    x, upstream = randoms(2, 7, 6).mul(3).requires_grad_(), randoms(2, 7, 4, seed=1)
    torch.manual_seed(3)
    out = layer(x)
    torch.manual_seed(3)
    mask = sequence_dropout_mask(x, dropout, training=True)
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
        torch.testing.assert_close(layer.eval()(x), layer(x))


def test_masks_of_sequences() -> None:
    x = torch.zeros(400, 3, 2)
    torch.manual_seed(0)
    dropped = sequence_dropout_mask(x, 0.25, training=True)
    assert dropped is not None
    assert dropped.shape == (400, 1, 2)
    torch.testing.assert_close(dropped.unique(), torch.tensor([0.0, 4 / 3]))
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.1)
    assert sequence_dropout_mask(x, 0.25, training=False) is None
    kept = keep_mask(x, 0.25)
    assert kept is not None
    assert kept.shape == (400, 1, 1)
    assert kept.mean().item() == pytest.approx(0.75, abs=0.08)
    assert keep_mask(x, 0.0) is None


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


def test_balancer_of_a_constant_channel_is_finite() -> None:
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


def test_whiten_looks_more_often_while_over_its_limit() -> None:
    within, over = Whiten(Clock(), 2.0), Whiten(Clock(), 2.0)
    within.over_limit.fill_(False)
    refresh([within, over])
    assert (within.probability, over.probability) == (0.025, 0.25)
    assert "over_limit" in over.state_dict()


def test_bias_norm() -> None:
    norm = BiasNorm(5).double()
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


def test_softmax_equals_torch() -> None:
    scores = randoms(2, 3, 4).requires_grad_()
    assert torch.autograd.gradcheck(gradient.softmax, scores)
    torch.testing.assert_close(gradient.softmax(scores), scores.softmax(dim=-1))
    half = randoms(2, 4).bfloat16().requires_grad_()
    assert gradient.softmax(half).dtype == torch.bfloat16


def test_gradients_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient, "chance", lambda probability: probability > 0)
    value = torch.tensor([0.1, 0.1, 0.5, 0.5, 1.2, 1.2]).requires_grad_()
    upstream = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    gradient.limit_parameter(value, 0.2, 1.0).backward(upstream)
    assert value.grad is not None
    assert value.grad.tolist() == [-1.0, -1.0, 1.0, -1.0, 1.0, 1.0]
    scores = torch.tensor([-30.0, -20.0, 20.0, 30.0]).requires_grad_()
    # Whatever the scale of the loss, the penalty is as large as the mean gradient.
    for scale in (1.0, 1e-6):
        scores.grad = None
        gradient.limit_scores(scores).backward(scale * torch.tensor([0.0, 1.0, -3.0, 0.0]))
        assert scores.grad is not None
        torch.testing.assert_close(scores.grad / scale, torch.tensor([-1.0, 1.0, -3.0, 1.0]))
    scaled = torch.ones(2, requires_grad=True)
    gradient.ScaleGradient(0.2)(scaled).sum().backward()
    assert scaled.grad is not None
    torch.testing.assert_close(scaled.grad, torch.full((2,), 0.2))


def test_positions_enter_by_distance() -> None:
    """Scores of attention by hand: query . key + position query . projected encoding of s - t."""
    heads, count = 2, 5
    weights = AttentionWeights(Clock(), 8, heads, 3, 2, 6).double().eval()
    weights.linear_pos.weight.data = randoms(4, 6, seed=4)
    x = randoms(1, count, 8)
    encodings = relative_positions(0, count, 6, x)
    frames = frames_at_rate(torch.tensor([count]), count, 1, Chunking(), encodings)
    got, _ = weights(x, frames, None)
    query, key, position = weights.in_proj(x[0]).split([6, 6, 4], dim=-1)
    for head in range(heads):
        scores = torch.zeros(count, count, dtype=torch.float64)
        q, k = query[:, 3 * head : 3 * head + 3], key[:, 3 * head : 3 * head + 3]
        p = position[:, 2 * head : 2 * head + 2]
        matrix = weights.linear_pos.weight[2 * head : 2 * head + 2]
        for t in range(count):
            for s in range(count):
                scores[t, s] = q[t] @ k[s] + p[t] @ (matrix @ encodings[count + s - t])
        torch.testing.assert_close(got[0, head], scores.softmax(dim=-1))


def test_encodings_of_positions() -> None:
    dim = 8
    encodings = relative_positions(3, 4, dim, torch.zeros(0))
    assert encodings.shape == (3 + 4 + 4, dim)
    for row, distance in enumerate(range(-7, 4)):
        pressed = math.copysign(
            math.sqrt(dim) * math.log(1 + abs(distance) / math.sqrt(dim)), distance
        )
        angle = math.atan(2 * math.pi * pressed / dim)
        expected = [f(angle * k) for k in range(1, dim // 2 + 1) for f in (math.cos, math.sin)]
        expected[-1] = 1.0
        torch.testing.assert_close(encodings[row], torch.tensor(expected))


def test_downsample_repeats_the_last_frame() -> None:
    downsample = Downsample(3).double()
    downsample.bias.data = randoms(3)
    weights = downsample.bias.softmax(dim=0)
    x = randoms(2, 6, 2)
    got = downsample(x, torch.tensor([4, 6]))
    filled = torch.cat((x[0, :4], x[0, 3:4], x[0, 3:4])).view(2, 3, 2)
    torch.testing.assert_close(got[0], torch.einsum("tde,d->te", filled, weights))
    torch.testing.assert_close(got[1], torch.einsum("tde,d->te", x[1].view(2, 3, 2), weights))
