"""Rows of lattice nodes: padded, or packed without padding, full lattice or band.

Axes: N batch, T frames, U symbols, S columns kept a frame, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.loss.checks import INTEGERS, check_tensor, readable
from pruned_rnnt.loss.results import Bounds
from pruned_rnnt.ops.common.row_geometry import RowGeometry, cumulated
from pruned_rnnt.ops.common.utterances import Utterances


def packed_row_splits(logit_lengths: Tensor, target_lengths: Tensor) -> Tensor:
    """Where each utterance's rows begin in packed logits (sum T_n (U_n+1), V).

    Args:
        logit_lengths, target_lengths: (N,) integers, on one device.

    Returns:
        (N+1,) int64 on that device; the last element is the number of rows.
    """
    check_tensor("logit_lengths", logit_lengths)
    check_tensor("target_lengths", target_lengths)
    return cumulated(logit_lengths.long() * (target_lengths.long() + 1))


def row_splits_to_row_ids(row_splits: Tensor, row_count: int | None = None) -> Tensor:
    """The utterance of each packed row.

    Args:
        row_splits: (N+1,) integers that start at 0 and do not decrease.
        row_count: row_splits[-1] where it is known: spares a device the wait for it.

    Returns:
        (R,) of the dtype of row_splits; utterance n has row_splits[n+1] - row_splits[n] rows.
    """
    check_tensor("row_splits", row_splits)
    if row_splits.dtype not in INTEGERS or row_splits.dim() != 1 or row_splits.numel() < 1:
        raise ValueError(
            f"row_splits is {row_splits.dtype} of shape {tuple(row_splits.shape)}; it must be "
            "integers (N+1,)"
        )
    utterances = torch.arange(
        row_splits.numel() - 1, dtype=row_splits.dtype, device=row_splits.device
    )
    return torch.repeat_interleave(utterances, row_splits.diff(), output_size=row_count)


def given_packed_rows(
    utterances: Utterances, bounds: Bounds | None, rows: int, validate: bool
) -> tuple[Utterances, RowGeometry]:
    """The geometry of packed logits that the caller gives: their rows must add up.

    Where the lengths cannot be read, utterances that the rows do not cover lose their path.
    """
    columns = utterances.targets.shape[1] + 1 if bounds is None else bounds.s_range
    lengths = utterances.host_lengths or (utterances.logit_lengths, utterances.target_lengths)
    if bounds is None:
        splits = packed_row_splits(*lengths)
    else:
        splits = cumulated(lengths[0].long() * bounds.s_range)
    if readable(validate, splits):
        if int(splits[-1]) != rows:
            formula = "logit_lengths * " + ("(target_lengths + 1)" if bounds is None else "s_range")
            raise ValueError(
                f"logits has {rows} packed rows, but the sum of {formula} is {int(splits[-1])}"
            )
        frames = int(lengths[0].max())
        splits = splits.to(utterances.targets.device, non_blocking=True)
    else:
        covered = splits[1:] <= rows
        empty = torch.where(covered, utterances.logit_lengths, 0)
        utterances = utterances._replace(logit_lengths=empty)
        frames = rows
    if bounds is None:
        return utterances, RowGeometry(None, splits, frames, columns)
    return utterances, RowGeometry(bounds.start, splits, bounds.start.shape[1], columns)
