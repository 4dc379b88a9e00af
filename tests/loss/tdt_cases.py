"""Ragged TDT batches and their references in float64.

Axes: N batch, T frames, U symbols, S columns kept a frame, V vocabulary, K durations.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt import Bounds
from tests.loss.loss_cases import Batch, make_batch, pack, random_logits
from tests.tdt_paths import tdt_paths, tdt_scores, tdt_total

DURATIONS = [(0, 1, 2, 3, 4), (0, 1, 2), (1, 0), (1,), (1, 2, 4), (0, 2, 3)]


class TdtInputs(NamedTuple):
    """logits (N,T,U+1,V) and duration_logits (N,T,U+1,K), leaves in float64 on the CPU."""

    logits: Tensor
    durations: Tensor


def every_small_tdt_batch(durations: Sequence[int], blank: int = 0) -> Batch:
    """All T_n in 1..4 and U_n in 0..3 that have a path, as one ragged batch."""
    pairs = [
        pair
        for pair in itertools.product(range(1, 5), range(4))
        if next(tdt_paths(*pair, durations), None) is not None
    ]
    return make_batch([t for t, _ in pairs], [u for _, u in pairs], 5, blank)


def random_tdt_inputs(batch: Batch, durations: Sequence[int]) -> TdtInputs:
    logits = random_logits(batch)
    shape = (*logits.shape[:3], len(durations))
    return TdtInputs(logits, torch.randn(shape, dtype=torch.float64).requires_grad_())


def tdt_reference(
    inputs: TdtInputs,
    batch: Batch,
    durations: Sequence[int],
    sigma: float = 0.0,
    bounds: Bounds | None = None,
) -> Tensor:
    """Losses (N,) by all paths, differentiable; of the whole lattice, or inside bounds."""
    losses = []
    for n, (frames, symbols) in enumerate(zip(batch.frames_N, batch.symbols_N, strict=True)):
        rows = [x[n, :, : symbols + 1] for x in inputs]
        scores = tdt_scores(*rows, batch.targets[n, :symbols].tolist(), batch.blank, sigma)
        band = () if bounds is None else (bounds.start[n], bounds.s_range)
        losses.append(-tdt_total(scores, frames, symbols, durations, *band))
    return torch.stack(losses)


def tdt_loss(
    inputs: TdtInputs, batch: Batch, device: str = "cpu", packed: bool = False, **options
) -> Tensor:
    """rnnt_loss_tdt, (N,)."""
    given = [(pack(x, batch) if packed else x).to(device) for x in inputs]
    return pruned_rnnt.rnnt_loss_tdt(
        *given,
        batch.targets.to(device),
        *batch.lengths(device),
        blank=batch.blank,
        reduction="none",
        **options,
    )
