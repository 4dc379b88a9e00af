"""The results of the losses, all named tuples, and their reduction."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Occupancy(NamedTuple):
    """How probable each arc of the lattice is, given the targets; no gradient.

    emit: (N, T, U+1), probability of emitting symbol u+1 at frame t; its last column is 0.
    blank: (N, T, U+1), probability of the blank that leaves node (t, u).
    Both are 0 outside an utterance's lengths. They are d log P / d of the arc's log-probability,
    so that with `constrained` blank also counts the blank that belongs to a symbol.
    """

    emit: Tensor
    blank: Tensor


class TdtOccupancy(NamedTuple):
    """How probable each arc of a TDT lattice is, given the targets; no gradient.

    emit, blank: see Occupancy, summed over durations.
    stay: (N, T, U+1), the part of emit whose duration is 0.
    durations: (N, T, U+1, K), of the emit and the blank with each duration.
    """

    emit: Tensor
    blank: Tensor
    stay: Tensor
    durations: Tensor


class SimpleLoss(NamedTuple):
    """loss: (N,) or a scalar, by reduction. occupancy: the argument of prune_bounds."""

    loss: Tensor
    occupancy: Occupancy


class Bounds(NamedTuple):
    """The band: frame t of utterance n keeps the columns start[n, t] .. start[n, t] + s_range - 1.

    start: (N, T) int32.
    """

    start: Tensor
    s_range: int

    @property
    def ranges(self) -> Tensor:
        """(N, T, S) int64: every kept column, as k2 writes the band."""
        return self.start.long()[:, :, None] + torch.arange(self.s_range, device=self.start.device)


class PrunedInputs(NamedTuple):
    """am: (N, T, S, D), a view that repeats each frame. lm: (N, T, S, D), gathered."""

    am: Tensor
    lm: Tensor


class LatticeOccupancy(NamedTuple):
    """Occupancies in k2's layout. emit: shaped like px. blank: (N, U+1, T)."""

    emit: Tensor
    blank: Tensor


class MutualInformation(NamedTuple):
    """total: (N,), log P, differentiable. occupancy: its derivatives, without gradient."""

    total: Tensor
    occupancy: LatticeOccupancy


class UtteranceLosses(NamedTuple):
    """Losses of each utterance, (N,), without gradient: total = simple_scale * simple +
    pruned_scale * pruned."""

    total: Tensor
    simple: Tensor
    pruned: Tensor


class TransducerLosses(NamedTuple):
    """Losses of PrunedTransducerLoss, with the band and the scales that they used.

    loss: simple_scale * simple_loss + pruned_scale * pruned_loss; all three (N,) or scalars, by
    the module's reduction.
    occupancy: of the simple loss; a TdtOccupancy if the module has durations.
    utterances: the losses of each utterance, for logs: for every reduction, and without gradient.
    """

    loss: Tensor
    simple_loss: Tensor
    pruned_loss: Tensor
    occupancy: Occupancy | TdtOccupancy
    bounds: Bounds
    simple_scale: float
    pruned_scale: float
    utterances: UtteranceLosses


def reduced(loss_N: Tensor, reduction: str) -> Tensor:
    """`mean` and `sum` are over utterances, the last dimension."""
    if reduction == "mean":
        return loss_N.mean(-1)
    return loss_N.sum(-1) if reduction == "sum" else loss_N
