"""The small ragged batch in float64 of the compat tests, and its oracle."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.lattice_paths import joiner_log_probs, log_total

# One utterance is full, one is shorter in both axes, one has no symbols, one has a single frame.
LENGTHS = [(4, 3), (3, 2), (4, 0), (1, 1)]
FRAMES = torch.tensor([t for t, _ in LENGTHS])
SYMBOLS = torch.tensor([u for _, u in LENGTHS])
VOCABULARY = 6
BLANK = 2
# Upstream gradients of the losses: positive, negative and zero.
UPSTREAM = torch.tensor([0.5, -2.0, 0.0, 1.25], dtype=torch.float64)


class Batch(NamedTuple):
    logits: Tensor  # (N, T, U + 1, V)
    am: Tensor  # (N, T, V)
    lm: Tensor  # (N, U + 1, V)
    targets: Tensor  # (N, U) int64
    boundary: Tensor  # (N, 4) int64


def batch(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.requires_grad_()

    size, frames, symbols = 4, 4, 3
    targets = torch.randint(0, VOCABULARY - 1, (size, symbols), generator=generator)
    targets = targets + (targets >= BLANK)
    boundary = torch.zeros(size, 4, dtype=torch.int64)
    boundary[:, 2], boundary[:, 3] = SYMBOLS, FRAMES
    return Batch(
        normal(size, frames, symbols + 1, VOCABULARY),
        normal(size, frames, VOCABULARY),
        normal(size, symbols + 1, VOCABULARY),
        targets,
        boundary,
    )


def oracle_losses(
    logits: Tensor,
    targets: Tensor,
    rnnt_type: str = "regular",
    *,
    blank: int = BLANK,
    hat: bool = False,
    delay_penalty: float = 0.0,
    keep: Callable[[int, int, int], bool] | None = None,
    lengths: Sequence[tuple[int, int]] = LENGTHS,
) -> Tensor:
    """Minus the log of the sum over all paths of each utterance, (N,), differentiable.

    keep(n, t, u) is true for the nodes that a band keeps; arcs from other nodes are forbidden.
    """
    losses = []
    for n, (frames, symbols) in enumerate(lengths):
        words = targets[n, :symbols].tolist()
        emit, none = joiner_log_probs(logits[n, :frames, : symbols + 1], words, blank, hat=hat)
        time = torch.arange(frames, dtype=torch.float64)
        emit = emit + delay_penalty * ((frames - 1) / 2 - time)[:, None]
        if keep is not None:
            kept = torch.tensor(
                [[keep(n, t, u) for u in range(symbols + 1)] for t in range(frames)]
            )
            emit, none = emit.where(kept, -torch.inf), none.where(kept, -torch.inf)
        losses.append(-log_total(emit, none, frames, symbols, rnnt_type))
    return torch.stack(losses)


def assert_same_gradients(got: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Asserts that losses (N,) agree, and the gradients of their weighted sum."""
    torch.testing.assert_close(got, expected)
    got_grads = torch.autograd.grad(got, inputs, UPSTREAM, retain_graph=True)
    expected_grads = torch.autograd.grad(expected, inputs, UPSTREAM, retain_graph=True)
    for got_grad, expected_grad in zip(got_grads, expected_grads, strict=True):
        torch.testing.assert_close(got_grad, expected_grad.nan_to_num(0.0))
