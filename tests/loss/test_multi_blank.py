"""The multi-blank loss against all paths, the RNN-T loss, float64 and finite differences."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import pruned_rnnt
from tests.loss import loss_cases as cases

V = 7
BIG = {6: 2, 4: 3}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(47)


def path_scores(
    log_probs: Tensor, targets: list[int], durations: dict[int, int], emit_factor: float
) -> Iterator[Tensor]:
    """Log-probabilities of all paths through the nodes (T, U_n+1, V) of one utterance, with
    gradients through symbols times emit_factor."""
    frames, symbols = log_probs.shape[0], len(targets)

    def extend(t: int, u: int, score: Tensor) -> Iterator[Tensor]:
        if t == frames:
            if u == symbols:
                yield score
            return
        for column, duration in durations.items():
            if t + duration <= frames:
                yield from extend(t + duration, u, score + log_probs[t, u, column])
        if u < symbols:
            emit = log_probs[t, u, targets[u]]
            scaled = emit.detach() + emit_factor * (emit - emit.detach())
            yield from extend(t, u + 1, score + scaled)

    yield from extend(0, 0, log_probs.new_zeros(()))


def small_batch(blank: int = 0) -> cases.Batch:
    """All T_n in 1..4 and U_n in 0..3; targets are no blanks."""
    pairs = list(itertools.product(range(1, 5), range(4)))
    batch = cases.make_batch([t for t, _ in pairs], [u for _, u in pairs], V, blank)
    return without_blanks(batch)


def without_blanks(batch: cases.Batch) -> cases.Batch:
    targets = torch.tensor([1, 2, 3])[torch.randint(3, batch.targets.shape)]
    return batch._replace(targets=targets.to(batch.targets))


def loss_of(
    logits: Tensor, batch: cases.Batch, device: str = "cpu", packed: bool = False, **options
) -> Tensor:
    """rnnt_loss_multi_blank, (N,)."""
    given = cases.pack(logits, batch) if packed else logits
    options = {"big_blanks": BIG, "blank": batch.blank, "reduction": "none", **options}
    arguments = (batch.targets.to(device), *batch.lengths(device))
    return pruned_rnnt.rnnt_loss_multi_blank(given.to(device), *arguments, **options)


def reference(
    logits: Tensor, batch: cases.Batch, sigma: float = 0.0, emit_factor: float = 1.0
) -> Tensor:
    losses = []
    for n, (frames, symbols) in enumerate(zip(batch.frames_N, batch.symbols_N, strict=True)):
        log_probs = logits[n, :frames, : symbols + 1].log_softmax(-1) - sigma
        targets = batch.targets[n, :symbols].tolist()
        scores = path_scores(log_probs, targets, {batch.blank: 1, **BIG}, emit_factor)
        losses.append(-torch.stack(list(scores)).logsumexp(0))
    return torch.stack(losses)


@pytest.mark.parametrize("device", cases.DEVICES)
@cases.every_layout
@pytest.mark.parametrize(("blank", "sigma", "fastemit"), [(0, 0.0, 0.0), (5, 0.05, 0.3)])
def test_loss_and_gradient_are_those_of_all_paths(packed, blank, sigma, fastemit, device) -> None:
    batch = small_batch(blank)
    logits = cases.random_logits(batch)
    options = {"sigma": sigma, "fastemit_lambda": fastemit}
    loss = loss_of(logits, batch, device, packed, **options)
    expected = reference(logits, batch, sigma, 1 + fastemit)
    cases.assert_same_loss_and_gradients(loss, expected, batch.upstream(), logits)


def test_without_big_blanks_it_is_the_rnnt_loss() -> None:
    batch = cases.make_batch([9, 7, 4], [4, 3, 0], V, 2)
    logits = cases.random_logits(batch)
    options = {"blank": 2, "delay_penalty": 0.1, "fastemit_lambda": 0.2, "clamp": 0.3}
    for reduction in ("none", "mean", "sum"):
        arguments = (logits, batch.targets, *batch.lengths("cpu"))
        got = loss_of(logits, batch, big_blanks={}, **{**options, "reduction": reduction})
        want = pruned_rnnt.rnnt_loss(*arguments, **options, reduction=reduction)
        upstream = torch.rand_like(want)
        cases.assert_same_loss_and_gradients(got, want, upstream, logits)


def test_gradcheck() -> None:
    batch = without_blanks(cases.make_batch([4, 5], [2, 1], V, 0))
    logits = cases.random_logits(batch)
    options = {"sigma": 0.05, "delay_penalty": 0.1}
    assert torch.autograd.gradcheck(lambda x: loss_of(x, batch, **options), (logits,))


@pytest.mark.parametrize("device", cases.DEVICES)
@cases.every_layout
@cases.tolerances(float32=2e-5, float16=2e-3, bfloat16=1e-2)
def test_dtypes(dtype, tolerance, packed, device) -> None:
    batch = without_blanks(cases.make_batch([19, 23, 8], [6, 9, 3], V, 0))
    # Blanks take most of each distribution, as in trained models.
    raised = 8.0 * torch.isin(torch.arange(V), torch.tensor([0, *BIG]))
    given = (cases.random_logits(batch).detach() + raised).to(dtype)
    wide = given.double().requires_grad_()
    given = given.to(device).requires_grad_()
    options = {"sigma": 0.05, "fastemit_lambda": 0.1}
    loss = loss_of(given, batch, device, packed, **options)
    expected = loss_of(wide, batch, **options)
    cases.assert_near_float64(loss, expected, batch.upstream(), [given], [wide], tolerance)


@pytest.mark.parametrize("device", cases.DEVICES)
def test_clamp_and_in_place(device) -> None:
    batch = small_batch()
    logits = cases.random_logits(batch)
    ones = torch.ones(batch.size, dtype=torch.float64)
    (free,) = cases.gradients(loss_of(logits, batch, device), ones, logits)
    leaf = logits.detach().to(device).clone().requires_grad_()
    loss_of(leaf, batch, device, in_place=True, clamp=0.02).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.data_ptr() == leaf.data_ptr()
    torch.testing.assert_close(leaf.grad.cpu(), free.clamp(-0.02, 0.02))


@pytest.mark.parametrize("device", cases.DEVICES)
def test_padding_nan_and_utterances_without_a_path(device) -> None:
    batch = without_blanks(cases.make_batch([6, 4, 5, 3], [3, 1, 2, 1], V, 0))
    logits = cases.random_logits(batch)
    clean = loss_of(logits, batch, device)
    dirty = logits.detach().clone()
    dirty[1, 4:] = dirty[1, :, 2:] = torch.nan
    dirty[2, 1, 0] = torch.nan
    dirty[3] = -torch.inf
    dirty.requires_grad_()
    loss = loss_of(dirty, batch, device)
    assert torch.equal(loss[:2], clean[:2])
    assert loss[2].isnan()
    assert loss[3] == torch.inf
    weights = torch.tensor([1.0, 2.0, 0.0, 1.0], dtype=torch.float64)
    (got,) = cases.gradients(loss, weights, dirty)
    (want,) = cases.gradients(clean, weights, logits)
    assert torch.equal(got[:2], want[:2])
    assert not got[3].any()


@pytest.mark.parametrize("device", cases.DEVICES)
def test_long_input(device) -> None:
    """float32 against float64, and against the sum over a gradient's row, which is 0."""
    frames, symbols = 5000, 40
    logits = 2 * torch.randn(1, frames, symbols + 1, V)
    targets = torch.tensor([1, 2, 3])[torch.randint(3, (1, symbols))]
    losses, grads = [], []
    for where, dtype in (("cpu", torch.float64), (device, torch.float32)):
        leaf = logits.to(where, dtype).requires_grad_()
        loss = pruned_rnnt.rnnt_loss_multi_blank(leaf, targets.to(where), big_blanks=BIG)
        grads.append(torch.autograd.grad(loss, leaf)[0].cpu().double())
        losses.append(loss.detach().cpu().double())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    assert (grads[1] - grads[0]).norm() < 1e-4 * grads[0].norm()
    assert grads[1].sum(-1).abs().max() < 1e-5


def test_impossible_arguments_are_refused() -> None:
    logits, targets = torch.randn(1, 3, 2, 20), torch.ones(1, 1, dtype=torch.int32)
    many = {column: column for column in range(2, 17)}
    for big_blanks, message in (
        ({20: 2}, "column 20; it must be in 0..19"),
        ({0: 2}, "not that of blank"),
        ({3: 1}, r"big_blanks\[3\] is 1"),
        ({3: 2, 4: 2}, "needs a duration of its own"),
        (many, "has 15 elements; it can have 14 at most"),
        ({1: 2}, r"targets\[0, 0\] of utterance 0 is 1; .* not the blank 1"),
    ):
        with pytest.raises(ValueError, match=message):
            pruned_rnnt.rnnt_loss_multi_blank(logits, targets, big_blanks=big_blanks)


@pytest.mark.gpu
def test_a_target_that_is_a_big_blank_has_no_path_on_the_device() -> None:
    logits = torch.randn(2, 3, 2, V, device="cuda", requires_grad=True)
    targets = torch.tensor([[6], [1]], device="cuda")
    loss = pruned_rnnt.rnnt_loss_multi_blank(logits, targets, big_blanks=BIG, reduction="none")
    assert loss[0] == torch.inf
    assert loss[1].isfinite()
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert not grad[0].any()
    with pytest.raises(ValueError, match="not the blank 6"):
        pruned_rnnt.rnnt_loss_multi_blank(logits, targets, big_blanks=BIG, validate=True)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    batch = without_blanks(cases.make_batch([19, 23, 8], [6, 9, 3], V, 0))
    logits = cases.random_logits(batch).detach().float().cuda().requires_grad_()
    arguments = (batch.targets.cuda(), *batch.lengths("cuda"))

    def step() -> tuple[Tensor, Tensor]:
        loss = pruned_rnnt.rnnt_loss_multi_blank(logits, *arguments, big_blanks=BIG)
        return loss.detach(), torch.autograd.grad(loss, logits)[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        logits.copy_(torch.randn_like(logits))
    graph.replay()
    for got, want in zip(captured, step(), strict=True):
        assert torch.equal(got, want)
