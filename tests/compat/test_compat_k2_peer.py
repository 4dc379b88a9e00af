"""compat.fast_rnnt against fast_rnnt, which has k2's functions: same inputs, same numbers."""

import pytest
import torch
from torch import Tensor

from pruned_rnnt.compat import fast_rnnt as ours

fast_rnnt = pytest.importorskip("fast_rnnt")

TYPES = ["regular", "modified", "constrained"]


def example(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """lm, am (float64), symbols, boundary of a ragged batch without empty references."""
    generator = torch.Generator().manual_seed(seed)
    boundary = torch.tensor([[0, 0, 8, 13], [0, 0, 3, 13], [0, 0, 6, 8], [0, 0, 1, 9]])
    lm = torch.randn(4, 9, 7, generator=generator, dtype=torch.float64)
    am = torch.randn(4, 13, 7, generator=generator, dtype=torch.float64)
    return lm, am, torch.randint(1, 7, (4, 8), generator=generator), boundary


def both(function: str, tensors: list[Tensor], *arguments: object, **options: object) -> None:
    """The two modules' results and gradients (of a random weighting of all results) agree."""
    outcomes = []
    for module in (fast_rnnt, ours):
        leaves = [x.clone().requires_grad_() for x in tensors]
        results = _flat(getattr(module, function)(*leaves, *arguments, **options))
        weighted = sum(
            (x.masked_fill(x == -torch.inf, 0.0) * _weight(x)).sum()
            for x in results
            if x.requires_grad
        )
        # The peer's backward overwrites the occupancies that it has returned.
        results = [x.detach().clone().requires_grad_(x.requires_grad) for x in results]
        outcomes.append((results, torch.autograd.grad(weighted, leaves)))
    (expected, expected_grads), (got, got_grads) = outcomes
    assert [x.requires_grad for x in got] == [x.requires_grad for x in expected]
    for x, y in zip((*got, *got_grads), (*expected, *expected_grads), strict=True):
        torch.testing.assert_close(x, y)


def _flat(result: Tensor | tuple) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [tensor for part in result for tensor in _flat(part)]


def _weight(x: Tensor) -> Tensor:
    return torch.linspace(-1, 2, x.numel(), dtype=x.dtype).reshape(x.shape)


@pytest.mark.parametrize("rnnt_type", TYPES)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("delay_penalty", [0.0, 0.2])
def test_losses(rnnt_type: str, seed: int, delay_penalty: float) -> None:
    lm, am, symbols, boundary = example(seed)
    options = {
        "boundary": boundary,
        "rnnt_type": rnnt_type,
        "delay_penalty": delay_penalty,
        "reduction": "none",
        "return_grad": True,
    }
    both("rnnt_loss_simple", [lm, am], symbols, 0, **options)
    both("rnnt_loss_smoothed", [lm, am], symbols, 0, **options)
    both("rnnt_loss_smoothed", [lm, am], symbols, 0, 0.25, 0.0, **options)
    logits = am[:, :, None] + lm[:, None]
    both("rnnt_loss", [logits], symbols, 0, **options)
    options.pop("return_grad")
    both("rnnt_loss", [logits], symbols, 0, **options)


@pytest.mark.parametrize("rnnt_type", TYPES)
def test_log_probs(rnnt_type: str) -> None:
    lm, am, symbols, boundary = example(0)
    options = {"boundary": boundary, "rnnt_type": rnnt_type}
    both("get_rnnt_logprobs", [lm, am], symbols, 0, **options)
    both("get_rnnt_logprobs_smoothed", [lm, am], symbols, 0, 0.2, 0.1, **options)
    both("get_rnnt_logprobs_joint", [am[:, :, None] + lm[:, None]], symbols, 0, **options)


@pytest.mark.parametrize("rnnt_type", TYPES)
@pytest.mark.parametrize("s_range", [2, 3, 5, 9])
@pytest.mark.parametrize("seed", range(3))
def test_pruned_losses(rnnt_type: str, s_range: int, seed: int) -> None:
    lm, am, symbols, boundary = example(seed)
    # Soft scores: with sharp ones many windows contain all the mass. Their scores differ by less
    # than 1e-5; k2 takes the largest, this package the middle one.
    _, grads = ours.rnnt_loss_simple(
        0.3 * lm, 0.3 * am, symbols, 0, boundary, rnnt_type, return_grad=True
    )
    ranges = ours.get_rnnt_prune_ranges(*grads, boundary, s_range)
    if rnnt_type == "regular":  # in other topologies symbols count, too, on purpose
        theirs = fast_rnnt.get_rnnt_prune_ranges(*grads, boundary, s_range)
        assert ranges.tolist() == theirs.tolist()
    both("do_rnnt_pruning", [am, lm], ranges)
    pruned = ours.do_rnnt_pruning(am, lm, ranges)
    logits = pruned[0] + pruned[1]
    options = {"boundary": boundary, "rnnt_type": rnnt_type}
    both("get_rnnt_logprobs_pruned", [logits], symbols, ranges, 0, **options)
    both("rnnt_loss_pruned", [logits], symbols, ranges, 0, **options, reduction="sum")
    both("rnnt_loss_pruned", [logits], symbols, ranges, 0, **options, return_grad=True)


@pytest.mark.parametrize("symbol_takes_frame", [False, True])
@pytest.mark.parametrize(
    "boundary",
    [None, [[0, 0, 8, 13], [1, 2, 4, 9], [0, 0, 0, 5], [2, 3, 7, 13]]],
)
def test_recursions(symbol_takes_frame: bool, boundary: list[list[int]] | None) -> None:
    """With finite px at the end frame, too, which k2's general recursion uses."""
    generator = torch.Generator().manual_seed(4)
    last = 13 if symbol_takes_frame else 14
    px = torch.randn(4, 8, last, generator=generator, dtype=torch.float64)
    py = torch.randn(4, 9, 13, generator=generator, dtype=torch.float64)
    edges = None if boundary is None else torch.tensor(boundary)
    both("mutual_information_recursion", [px, py], edges, return_grad=True)
    outcomes = []
    for module in (fast_rnnt, ours):
        leaves = [px.clone().requires_grad_(), py.clone().requires_grad_()]
        parts = module.joint_mutual_information_recursion(
            (leaves[0], 0.5 * leaves[0]), (leaves[1], leaves[1]), edges
        )
        outcomes.append((parts, *torch.autograd.grad((parts * _weight(parts)).sum(), leaves)))
    for got, expected in zip(outcomes[1], outcomes[0], strict=True):
        torch.testing.assert_close(got, expected)
