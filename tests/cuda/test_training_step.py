"""A training step on CUDA: equal to the CPU, without synchronisation, captured in a CUDA graph."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from scripts.benchmark.systems import warm_up
from tests.cuda.training_step import (
    HAS_KERNELS,
    Batch,
    Model,
    U,
    gradients,
    make_batch,
    make_model,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_KERNELS, reason="the CUDA library is not built"),
]

OPTIONS = [
    {},
    {"rnnt_type": "modified", "delay_penalty": 0.1, "exact_bounds": True},
    {"rnnt_type": "constrained", "fastemit_lambda": 0.2, "s_range": 3},
    {"rnnt_type": "rna", "am_only_scale": 0.1, "blank": 36},
    {"hat": True, "reduction": "sum"},
]
LENGTHS_ON = ["cpu", "cuda"]
options = pytest.mark.parametrize("options", OPTIONS, ids=lambda x: "-".join(x) or "default")


@options
@pytest.mark.parametrize("lengths_on", LENGTHS_ON)
def test_equals_the_cpu(lengths_on, options) -> None:
    expected = gradients(make_model("cpu", **options), make_batch("cpu", "cpu"))
    got = gradients(make_model("cuda", **options), make_batch("cuda", lengths_on))
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left.cpu(), right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("lengths_on", LENGTHS_ON)
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "16_bit_weights"])
@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.float16, 2e-2), (torch.bfloat16, 1e-1)], ids=str
)
def test_16_bits_are_near_float32(dtype, share, autocast, lengths_on) -> None:
    """The band covers the whole lattice, so that rounding cannot move it."""
    kind = torch.float32 if autocast else dtype
    expected = gradients(make_model("cpu", s_range=U + 2), make_batch("cpu", "cpu"))
    model = make_model("cuda", kind, s_range=U + 2)
    with torch.autocast("cuda", dtype, enabled=autocast):
        loss = 1.7 * model(make_batch("cuda", lengths_on, dtype=kind))
    assert loss.dtype == torch.float32
    got = [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
    for left, right in zip(got[1:], expected[1:], strict=True):
        assert left.dtype == kind
        bound = share * right.abs().max().item()
        torch.testing.assert_close(left.float().cpu(), right, rtol=share, atol=bound)
    torch.testing.assert_close(got[0].cpu(), expected[0], rtol=share, atol=0)


@options
@pytest.mark.parametrize("lengths_on", LENGTHS_ON)
def test_repeated_steps_are_bitwise_equal(lengths_on, options) -> None:
    model, batch = make_model("cuda", **options), make_batch("cuda", lengths_on)
    first = gradients(model, batch)
    for _ in range(2):
        for left, right in zip(gradients(model, batch), first, strict=True):
            assert torch.equal(left, right)


@options
@pytest.mark.parametrize("lengths_on", LENGTHS_ON)
def test_no_synchronisation_with_the_device(lengths_on, options) -> None:
    model, batch = make_model("cuda", **options), make_batch("cuda", lengths_on)
    gradients(model, batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(model, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- CUDA graphs ---------------------------------------------------------------------------------
class Training:
    """A model on CUDA with its optimiser. Each step allocates new gradients, or sets kept ones to
    zero."""

    def __init__(self, autocast: torch.dtype | None, kept_gradients: bool, **options: object):
        self.model: Model = make_model("cuda", **options)
        self.optimiser = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.autocast, self.kept_gradients = autocast, kept_gradients

    def step(self, batch: Batch) -> Tensor:
        self.optimiser.zero_grad(set_to_none=not self.kept_gradients)
        casts = torch.autocast("cuda", self.autocast) if self.autocast else nullcontext()
        with casts:
            loss = self.model(batch)
        loss.backward()
        self.optimiser.step()
        return loss.detach()


def captured(training: Training, batch: Batch) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of one step that reads its data from `batch`, and the tensor with its loss. The graph
    allocates gradients that are not kept."""
    warm_up(lambda: training.step(batch))
    training.optimiser.zero_grad(set_to_none=not training.kept_gradients)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = training.step(batch)
    return graph, loss


@options
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["float32", "autocast"])
@pytest.mark.parametrize("kept_gradients", [False, True], ids=["new", "kept"])
def test_a_captured_step_follows_new_data(kept_gradients, autocast, options) -> None:
    replayed = Training(autocast, kept_gradients, **options)
    weights = {name: x.clone() for name, x in replayed.model.state_dict().items()}
    static = make_batch("cuda", "cuda")
    graph, loss = captured(replayed, static)
    replayed.model.load_state_dict(weights)
    plain = Training(autocast, kept_gradients, **options)
    seen = []
    for seed in (5, 6, 7):
        batch = make_batch("cuda", "cuda", seed)
        for place, value in zip(static, batch, strict=True):
            place.copy_(value)
        graph.replay()
        seen.append(loss.item())
        torch.testing.assert_close(loss, plain.step(batch), rtol=1e-5, atol=1e-5)
    assert len(set(seen)) == 3
    for left, right in zip(replayed.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_a_captured_step_gives_infinity_for_invalid_lengths() -> None:
    """A length becomes invalid after the capture; the other utterances keep their losses."""
    training = Training(None, False, reduction="none")
    batch = make_batch("cuda", "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        warm_up(lambda: training.model(batch))
        with torch.cuda.graph(graph):
            losses = training.model(batch)
    graph.replay()
    assert losses.isfinite().all()
    batch.logit_lengths[2] = 1000
    graph.replay()
    assert losses.isinf().tolist() == [False, False, True]
