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
from pruned_rnnt import Bounds, TdtOccupancy
from pruned_rnnt.loss.batch import check_am_lm, check_batch
from pruned_rnnt.loss.checks import check_options
from pruned_rnnt.loss.durations import tdt_recursion
from pruned_rnnt.loss.results import reduced
from pruned_rnnt.loss.simple import check_scales
from pruned_rnnt.ops.simple.simple_loss import SimpleInputs, simple_loss
from tests.loss.loss_cases import Batch, make_batch, pack, random_logits
from tests.tdt_paths import tdt_paths, tdt_scores, tdt_total

DURATIONS = [(0, 1, 2, 3, 4), (0, 1, 2), (1, 0), (1,), (1, 2, 4), (0, 2, 3)]


class TdtSimpleLoss(NamedTuple):
    """loss (N,) or a scalar, and the occupancy."""

    loss: Tensor
    occupancy: TdtOccupancy


def simple_tdt_loss(
    am: Tensor,
    lm: Tensor,
    duration_am: Tensor,
    duration_lm: Tensor,
    *batch: Tensor,
    durations: Sequence[int] = DURATIONS[0],
    sigma: float = 0.0,
    fastemit_lambda: float = 0.0,
    lm_only_scale: float = 0.0,
    am_only_scale: float = 0.0,
    reduction: str = "mean",
) -> TdtSimpleLoss:
    """The TDT loss of the trivial joiner; batch: targets and lengths."""
    sizes = check_am_lm(am, lm, "V")
    options = check_options(0, sizes.vocabulary, fastemit_lambda=fastemit_lambda)
    recursion = tdt_recursion(options, durations, sigma)
    utterances = check_batch(*batch, sizes, recursion).on_device()
    scales = check_scales(options, lm_only_scale, am_only_scale)
    inputs = SimpleInputs(*(x.contiguous() for x in (am, lm, duration_am, duration_lm)))
    simple = simple_loss(inputs, utterances.tensors, scales._replace(recursion=recursion))
    return TdtSimpleLoss(reduced(simple.loss, reduction), TdtOccupancy(*simple[1:]))


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
