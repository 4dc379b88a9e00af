"""The multi-blank loss against all paths, the RNN-T loss and finite differences."""

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
    log_probs: Tensor, targets: list[int], durations: dict[int, int]
) -> Iterator[Tensor]:
    """Log-probabilities of all paths through the nodes (T, U_n+1, V) of one utterance."""
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
            yield from extend(t, u + 1, score + log_probs[t, u, targets[u]])

    yield from extend(0, 0, log_probs.new_zeros(()))


def small_batch() -> cases.Batch:
    """All T_n in 1..4 and U_n in 0..3; targets are no blanks."""
    pairs = list(itertools.product(range(1, 5), range(4)))
    batch = cases.make_batch([t for t, _ in pairs], [u for _, u in pairs], V, 0)
    targets = torch.tensor([1, 2, 3, 5])[torch.randint(4, batch.targets.shape)]
    return batch._replace(targets=targets.to(batch.targets))


@pytest.mark.parametrize("device", cases.DEVICES)
@pytest.mark.parametrize("sigma", [0.0, 0.05])
def test_loss_and_gradient_are_those_of_all_paths(sigma: float, device: str) -> None:
    batch = small_batch()
    logits = torch.randn(batch.size, batch.frames, batch.symbols + 1, V, dtype=torch.float64)
    logits = logits.to(device).requires_grad_()
    options = {"big_blanks": BIG, "sigma": sigma, "reduction": "none"}
    arguments = (batch.targets.to(device), *batch.lengths(device))
    loss = pruned_rnnt.rnnt_loss_multi_blank(logits, *arguments, **options)
    wanted = []
    for n, (frames, symbols) in enumerate(zip(batch.frames_N, batch.symbols_N, strict=True)):
        log_probs = logits[n, :frames, : symbols + 1].log_softmax(-1) - sigma
        targets = batch.targets[n, :symbols].tolist()
        scores = list(path_scores(log_probs, targets, {0: 1, **BIG}))
        wanted.append(-torch.stack(scores).logsumexp(0))
    torch.testing.assert_close(loss, torch.stack(wanted))
    weights = torch.rand(batch.size, dtype=torch.float64, device=device)
    (got,) = torch.autograd.grad(loss @ weights, logits)
    (want,) = torch.autograd.grad(torch.stack(wanted) @ weights, logits)
    torch.testing.assert_close(got, want)


def test_without_big_blanks_it_is_the_rnnt_loss() -> None:
    batch = cases.make_batch([9, 7, 4], [4, 3, 0], V, 2)
    logits = torch.randn(batch.size, batch.frames, batch.symbols + 1, V)
    arguments = (logits, batch.targets, *batch.lengths("cpu"))
    for reduction in ("none", "mean", "sum"):
        options = {"blank": 2, "reduction": reduction}
        got = pruned_rnnt.rnnt_loss_multi_blank(*arguments, big_blanks={}, **options)
        torch.testing.assert_close(got, pruned_rnnt.rnnt_loss(*arguments, **options))


def test_impossible_arguments_are_refused() -> None:
    logits, targets = torch.randn(1, 3, 2, V), torch.ones(1, 1, dtype=torch.int32)
    for big_blanks, message in (
        ({V: 2}, f"column {V}; it must be in 0..{V - 1}"),
        ({0: 2}, "not that of blank"),
        ({3: 1}, r"big_blanks\[3\] is 1"),
    ):
        with pytest.raises(ValueError, match=message):
            pruned_rnnt.rnnt_loss_multi_blank(logits, targets, big_blanks=big_blanks)
    with pytest.raises(ValueError, match="logits is packed"):
        pruned_rnnt.rnnt_loss_multi_blank(logits[0, 0], targets, big_blanks=BIG)
