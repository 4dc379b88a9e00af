"""Ragged batches, references in float64 and devices that the tests of the losses share.

Axes: N batch, T frames, U symbols, S columns kept a frame, V vocabulary.

The oracle sums over all paths one by one (lattice_paths.py). For larger lattices `twin_total` runs
the recurrence in plain torch, one node at a time, and autograd computes its gradient.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from pruned_rnnt import Bounds
from pruned_rnnt.loss import checks
from tests.lattice_paths import joiner_log_probs, log_total

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RNNT_TYPES = ["regular", "modified", "constrained", "rna"]
FAR = -1e30  # replaces -inf, whose gradient through logaddexp would be NaN

every_form = pytest.mark.parametrize(
    "form",
    [{}, {"from_log_probs": True}, {"hat": True}],
    ids=["logits", "log_probs", "hat"],
)
every_layout = pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])


def tolerances(**tolerance: float) -> pytest.MarkDecorator:
    """Parametrizes dtype and tolerance; the arguments are named like the dtypes of torch."""
    rows = [(getattr(torch, name), value) for name, value in tolerance.items()]
    return pytest.mark.parametrize(("dtype", "tolerance"), rows, ids=str)


class Batch(NamedTuple):
    """Lengths as lists, targets (N,U) on the CPU; padded sizes T and U, vocabulary V."""

    frames_N: list[int]
    symbols_N: list[int]
    targets: Tensor
    frames: int
    symbols: int
    vocabulary: int
    blank: int

    @property
    def size(self) -> int:
        return len(self.frames_N)

    def lengths(self, device: str) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.frames_N).to(device), torch.tensor(self.symbols_N).to(device)

    def upstream(self) -> Tensor:
        """Incoming gradients: none is 1, one is 0, some are negative."""
        return (
            torch.linspace(-1.5, 2.0, self.size, dtype=torch.float64)
            .roll(1)
            .index_fill(0, torch.tensor([self.size // 2]), 0.0)
        )


def make_batch(frames_N: list[int], symbols_N: list[int], vocabulary: int, blank: int) -> Batch:
    symbols = max(symbols_N)
    targets = torch.randint(0, vocabulary - 1, (len(frames_N), symbols))
    targets += targets >= blank
    return Batch(frames_N, symbols_N, targets, max(frames_N), symbols, vocabulary, blank)


def random_logits(batch: Batch) -> Tensor:
    """Leaf (N,T,U+1,V) in float64 on the CPU."""
    shape = (batch.size, batch.frames, batch.symbols + 1, batch.vocabulary)
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def has_path(frames: int, symbols: int, rnnt_type: str) -> bool:
    needed = {"regular": 1, "modified": symbols, "constrained": symbols, "rna": symbols + 1}
    return frames >= max(needed[rnnt_type], 1)


def every_small_batch(rnnt_type: str, blank: int = 0) -> Batch:
    """All T_n in 1..4 and U_n in 0..4 that have a path, as one ragged batch."""
    pairs = [
        pair
        for pair in itertools.product(range(1, 5), range(5))
        if has_path(pair[0], pair[1], rnnt_type)
    ]
    return make_batch([t for t, _ in pairs], [u for _, u in pairs], 5, blank)


def twin_total(
    emit: Tensor, blank: Tensor, frames: int, symbols: int, rnnt_type: str = "regular"
) -> Tensor:
    """log_total by the recurrence, node by node; emit, blank (T, U+1) of one utterance."""
    emit, blank = emit.clamp_min(FAR), blank.clamp_min(FAR)
    far = emit.new_full((), FAR)
    alpha = {(0, 0): emit.new_zeros(())}
    step = 0 if rnnt_type == "regular" else 1
    for t, u in itertools.product(range(frames + 1), range(symbols + 1)):
        if (t, u) == (0, 0):
            continue
        terms = []
        if t > 0:
            terms.append(alpha[t - 1, u] + blank[t - 1, u])
        source = t - step
        if u > 0 and 0 <= source < frames and not (rnnt_type == "rna" and source == frames - 1):
            term = alpha[source, u - 1] + emit[source, u - 1]
            terms.append(term + blank[source, u] if rnnt_type == "constrained" else term)
        alpha[t, u] = torch.stack(terms).logsumexp(0) if terms else far
    return alpha[frames, symbols]


def reference_losses(
    emit: list[Tensor],
    blank: list[Tensor],
    batch: Batch,
    rnnt_type: str = "regular",
    delay_penalty: float = 0.0,
    start: Tensor | None = None,
    s_range: int = 0,
    total: Callable[..., Tensor] = log_total,
) -> Tensor:
    """Losses (N,) from rows emit, blank (T, U_n+1) of each utterance, inside the band of
    start if that is not None."""
    losses = []
    for n, (frames, symbols) in enumerate(zip(batch.frames_N, batch.symbols_N, strict=True)):
        t = torch.arange(emit[n].shape[0])[:, None]
        px = emit[n] + delay_penalty * ((frames - 1) / 2 - t)
        py = blank[n]
        if start is not None:
            u = torch.arange(symbols + 1)
            first = start[n].cpu()[:, None]
            inside = (u >= first) & (u < first + s_range)
            px, py = (x.masked_fill(~inside, -torch.inf) for x in (px, py))
        losses.append(-total(px, py, frames, symbols, rnnt_type))
    return torch.stack(losses)


def reference_rows(
    logits: Tensor, batch: Batch, *, hat: bool = False, from_log_probs: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """emit, blank (T, U_n+1) of each utterance of padded logits (N,T,U+1,V), differentiable."""
    emit, blank = [], []
    for n, symbols in enumerate(batch.symbols_N):
        targets = batch.targets[n, :symbols].tolist()
        one = logits[n, :, : symbols + 1]
        if from_log_probs:
            columns = [one[:, u, y] for u, y in enumerate(targets)]
            columns.append(torch.full_like(one[:, 0, 0], -torch.inf))
            rows = torch.stack(columns, 1), one[..., batch.blank]
        else:
            rows = joiner_log_probs(one, targets, batch.blank, hat=hat)
        emit.append(rows[0])
        blank.append(rows[1])
    return emit, blank


def pack(logits: Tensor, batch: Batch) -> Tensor:
    """Padded logits (N,T,U+1,V) as packed rows, differentiable."""
    return torch.cat(
        [
            logits[n, :frames, : symbols + 1].flatten(0, 1)
            for n, (frames, symbols) in enumerate(zip(batch.frames_N, batch.symbols_N, strict=True))
        ]
    )


def gradients(loss_N: Tensor, upstream: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Gradients of the weighted sum of losses, on the CPU in float64."""
    total = (loss_N * upstream.to(loss_N)).sum()
    return [grad.cpu().double() for grad in torch.autograd.grad(total, inputs, retain_graph=True)]


def assert_same_loss_and_gradients(
    loss_N: Tensor, expected_N: Tensor, upstream: Tensor, *inputs: Tensor
) -> None:
    """Losses on any device against losses on the CPU, with their gradients for inputs."""
    torch.testing.assert_close(loss_N.cpu(), expected_N)
    expected_grads = gradients(expected_N, upstream, *inputs)
    for grad, expected in zip(gradients(loss_N, upstream, *inputs), expected_grads, strict=True):
        torch.testing.assert_close(grad, expected)


def assert_near_float64(
    loss_N: Tensor,
    expected_N: Tensor,
    upstream: Tensor,
    given: Sequence[Tensor],
    wide: Sequence[Tensor],
    tolerance: float,
) -> None:
    """Losses of narrow inputs on any device against those of the same values in float64.

    Losses must be float32, and gradients must have the dtype of their inputs; the tolerance of a
    gradient is relative to its largest element.
    """
    assert loss_N.dtype == torch.float32
    torch.testing.assert_close(loss_N.cpu().double(), expected_N, rtol=tolerance, atol=tolerance)
    grads = torch.autograd.grad((loss_N * upstream.to(loss_N)).sum(), given)
    wanted = gradients(expected_N, upstream, *wide)
    for x, grad, want in zip(given, grads, wanted, strict=True):
        assert grad.dtype == x.dtype
        scale = want.abs().max().item()
        torch.testing.assert_close(
            grad.cpu().double(), want, rtol=tolerance, atol=tolerance * scale
        )


def loss_on_device(
    function: Callable[..., Tensor],
    batch: Batch,
    tensors: Sequence[Tensor],
    bounds: Bounds | None,
    device: str,
    lengths_on: str | None = None,
    **options,
) -> Tensor:
    """The loss (N,) of a function that takes bounds, of the batch on a device.

    lengths_on: the device of the lengths, if it is another one.
    """
    if bounds is not None:
        bounds = Bounds(bounds.start.to(device), bounds.s_range)
    return function(
        *(x.to(device) for x in tensors),
        batch.targets.to(device),
        bounds,
        *batch.lengths(lengths_on or device),
        reduction="none",
        **options,
    )


@contextlib.contextmanager
def not_reading() -> Iterator[None]:
    """Lengths, targets and boundaries are read with validate=True alone."""
    # Other modules have the function by name, so that only its code can be replaced.
    code = checks.readable.__code__
    checks.readable.__code__ = (lambda validate, *tensors: validate).__code__
    try:
        yield
    finally:
        checks.readable.__code__ = code
