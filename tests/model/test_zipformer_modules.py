"""Schedules, positions and downsampling, each against its definition."""

from __future__ import annotations

import math

import pytest
import torch

from pruned_rnnt.model.zipformer.attention import AttentionWeights
from pruned_rnnt.model.zipformer.convolution import ChunkCausalConvolution
from pruned_rnnt.model.zipformer.frames import (
    UNLIMITED,
    Chunking,
    frames_at_rate,
    relative_positions,
)
from pruned_rnnt.model.zipformer.schedule import Clock, Schedule, ramp
from pruned_rnnt.model.zipformer.stack import Downsample
from tests.model.zipformer_tiny import randoms

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
        assert clock.value(schedule) == pytest.approx(value)
    assert clock.value(0.25) == 0.25


def test_bernoulli() -> None:
    clock = Clock()
    torch.manual_seed(1)
    assert not any(clock.bernoulli(0.0) for _ in range(9))
    assert all(clock.bernoulli(1.0) for _ in range(9))
    assert 0.2 < sum(clock.bernoulli(0.3) for _ in range(900)) / 900 < 0.4


def test_start_batch_discards_samples() -> None:
    """Then the generator's state before a batch is the only random state to save."""
    clock, outcomes = Clock(), []
    for earlier in (3, 700):
        torch.manual_seed(1)
        [clock.bernoulli(0.5) for _ in range(earlier)]
        torch.manual_seed(2)
        clock.start_batch()
        outcomes.append([clock.bernoulli(0.5) for _ in range(600)])
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][:88] != outcomes[0][512:]


def test_attention_uses_relative_positions() -> None:
    """Against loops: query . key + position query . projected encoding of s - t."""
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
        torch.testing.assert_close(got.one_NHTS[0, head], scores.softmax(dim=-1))


def test_relative_position_encodings() -> None:
    dim = 8
    encodings = relative_positions(3, 4, dim, torch.zeros(0))
    assert encodings.shape == (3 + 4 + 4, dim)
    for row, distance in enumerate(range(-7, 4)):
        compressed = math.copysign(
            math.sqrt(dim) * math.log(1 + abs(distance) / math.sqrt(dim)), distance
        )
        angle = math.atan(2 * math.pi * compressed / dim)
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


@pytest.mark.parametrize(("chunk", "left"), [(8, 2), (16, None), (64, 1), (None, None)])
def test_chunks_on_the_device_equal_those_of_the_host(chunk: int | None, left: int | None) -> None:
    """As captured passes have them, of which one serves all chunk sizes."""
    torch.manual_seed(0)
    lengths_N = torch.tensor([100, 61, 3])
    on_device = Chunking(
        chunk_size=torch.tensor([UNLIMITED if chunk is None else chunk]),
        left_chunks=torch.tensor([UNLIMITED if left is None else left]),
    )
    positions_RD = relative_positions(0, 128, 12, randoms(1))
    for rate in (1, 2, 8, *((16, 32) if chunk is None else ())):
        results = []
        convolution = ChunkCausalConvolution(6, 7).double()
        torch.nn.init.normal_(convolution.chunkwise_conv_scale)
        x_NTE = randoms(3, 128 // rate, 6).requires_grad_()
        for chunking in (Chunking(chunk_size=chunk, left_chunks=left), on_device):
            frames = frames_at_rate(lengths_N, 128, rate, chunking, positions_RD)
            mixed_NTE, _ = convolution(x_NTE, frames, None)
            # Frames beyond the length of an utterance that is one chunk have no factor.
            real_NTE = mixed_NTE * frames.real_NT1
            wanted = (x_NTE, *convolution.parameters())
            gradients = torch.autograd.grad((real_NTE * real_NTE.detach().cos()).sum(), wanted)
            count = 128 // rate
            results.append((frames.blocked.expand(3, 1, count, count), real_NTE, *gradients))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)
