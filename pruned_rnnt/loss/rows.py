"""The loss of logits of lattice nodes: padded or packed without padding, full lattice or band."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from pruned_rnnt.loss.batch import Sizes, check_batch, known_lengths
from pruned_rnnt.loss.bounds import check_bounds
from pruned_rnnt.loss.checks import (
    check_flag,
    check_floating,
    check_last_axis,
    check_shape,
    check_tensor,
)
from pruned_rnnt.loss.durations import check_duration_logits
from pruned_rnnt.loss.results import Bounds
from pruned_rnnt.ops.common.row_geometry import LatticeRows, packed_splits
from pruned_rnnt.ops.common.utterances import Utterances
from pruned_rnnt.ops.joiner.row_loss import is_in_place, row_loss
from pruned_rnnt.ops.lattice.recursion import Recursion


def check_logits(logits: Tensor, bounds: Bounds | None, in_place: bool = False) -> int:
    """V of logits of four dimensions, or packed."""
    check_tensor("logits", logits)
    columns = "U+1" if bounds is None else "S"
    shape = f"(N, T, {columns}, V) or packed (rows, V)"
    check_floating("logits", logits, shape, 2 if logits.dim() == 2 else 4)
    check_last_axis("logits", logits)
    if check_flag("in_place", in_place) and (not logits.is_contiguous() or logits.is_neg()):
        raise ValueError("in_place=True needs contiguous logits without a deferred change of sign")
    return logits.shape[-1]


def loss_of_logits(
    logits: Tensor,
    batch: tuple[Tensor, Tensor | None, Tensor | None],
    bounds: Bounds | None,
    recursion: Recursion,
    *,
    duration_logits: Tensor | None = None,
    in_place: bool = False,
    validate: bool = False,
    reduction: str = "none",
) -> Tensor:
    """(N,) or reduced, over the whole lattice or inside bounds, of logits that check_logits took;
    batch: targets and lengths, unchecked. duration_logits: of TDT, unchecked."""
    if recursion.tdt is not None and not recursion.blanks:
        dtype, durations = logits.dtype, recursion.tdt.durations
        logits, duration_logits = check_duration_logits(
            cast(Tensor, duration_logits), logits, durations
        )
        if in_place and logits.dtype != dtype:
            raise ValueError(
                f"in_place=True needs duration_logits of the precision of logits, {dtype}; they "
                f"are {duration_logits.dtype}"
            )
    utterances, rows = _rows_of_logits(logits, batch, bounds, recursion, validate)
    return row_loss(
        logits.contiguous(),
        duration_logits,
        utterances.targets,
        rows,
        recursion,
        reduction=reduction,
        in_place=is_in_place(in_place),
    )


def _rows_of_logits(
    logits: Tensor,
    batch: tuple[Tensor, Tensor | None, Tensor | None],
    bounds: Bounds | None,
    recursion: Recursion,
    validate: bool,
) -> tuple[Utterances, LatticeRows]:
    """The checked batch, on the device, and the geometry of padded or packed logits."""
    packed, vocabulary = logits.dim() == 2, logits.shape[-1]
    sizes = Sizes(None, None, None, vocabulary, logits.device, "logits")
    if not packed:
        count, frames, columns, _ = logits.shape
        symbols = columns - 1 if bounds is None else None
        sizes = sizes._replace(batch=count, frames=frames, symbols=symbols)
        if bounds is not None:
            shape = (count, frames, bounds.s_range, vocabulary)
            check_shape("logits", logits, shape, "(N, T, S, V) with bounds.s_range for S")
    checked = check_batch(*batch, sizes, recursion, validate)
    if bounds is not None:
        bounds = check_bounds(bounds, checked, sizes.frames, recursion, validate)
    if packed:
        return _packed_rows(checked, bounds, logits.shape[0], validate)
    utterances = checked.on_device()
    start = None if bounds is None else bounds.start
    return utterances, LatticeRows(*utterances.lengths, start, None, *logits.shape[1:3])


def _packed_rows(
    utterances: Utterances, bounds: Bounds | None, rows: int, validate: bool
) -> tuple[Utterances, LatticeRows]:
    """The utterances, on the device, and the geometry of packed logits that the caller passes,
    whose rows must add up.

    If the lengths cannot be read, utterances beyond the last row get no frames, and so no path.
    """
    columns = None if bounds is None else bounds.s_range
    known = known_lengths(utterances, validate)
    if known is None:
        splits = packed_splits(*utterances.lengths, columns)
        reached_N = torch.where(splits[1:] <= rows, utterances.logit_lengths, 0)
        utterances, frames = utterances._replace(logit_lengths=reached_N), rows
    else:
        row_splits, _ = known.packed_rows(columns)
        if row_splits[-1] != rows:
            formula = "logit_lengths * " + ("(target_lengths + 1)" if bounds is None else "s_range")
            raise ValueError(
                f"logits has {rows} packed rows, but the sum of {formula} is {row_splits[-1]}"
            )
        frames = max(known.logit_lengths)
        utterances, splits = utterances._replace(host_lengths=known).on_device_with(row_splits)
    lengths = utterances.lengths
    if bounds is None:
        sizes = (frames, utterances.targets.shape[1] + 1)
        return utterances, LatticeRows(*lengths, None, splits, *sizes)
    sizes = (bounds.start.shape[1], bounds.s_range)
    return utterances, LatticeRows(*lengths, bounds.start, splits, *sizes)
