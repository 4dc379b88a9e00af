"""Rows of lattice nodes: padded, or packed without padding, full lattice or band."""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.loss.checks import check_integers, check_tensor, readable
from pruned_rnnt.loss.results import Bounds
from pruned_rnnt.ops.common.row_geometry import LatticeRows, packed_splits
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
    return packed_splits(logit_lengths, target_lengths, None)


def row_splits_to_row_ids(row_splits: Tensor, row_count: int | None = None) -> Tensor:
    """The utterance of each packed row.

    Args:
        row_splits: (N+1,) integers that start at 0 and do not decrease.
        row_count: row_splits[-1] if it is known, which saves a synchronization with the device.

    Returns:
        (R,) of the dtype of row_splits; utterance n has row_splits[n+1] - row_splits[n] rows.
    """
    check_integers("row_splits", row_splits)
    if row_splits.dim() != 1 or row_splits.numel() < 1:
        raise ValueError(f"row_splits has shape {tuple(row_splits.shape)}; it must be (N+1,)")
    utterances = torch.arange(row_splits.numel() - 1).to(row_splits)
    return torch.repeat_interleave(utterances, row_splits.diff(), output_size=row_count)


def given_packed_rows(
    utterances: Utterances, bounds: Bounds | None, rows: int, validate: bool
) -> LatticeRows:
    """The geometry of packed logits that the caller passes, whose rows must add up.

    If the lengths cannot be read, utterances beyond the last row get no frames, and so no path.
    """
    targets, logit_lengths, target_lengths, _ = utterances
    lengths = utterances.known_lengths
    splits = packed_splits(*lengths, None if bounds is None else bounds.s_range)
    if readable(validate, splits):
        if int(splits[-1]) != rows:
            formula = "logit_lengths * " + ("(target_lengths + 1)" if bounds is None else "s_range")
            raise ValueError(
                f"logits has {rows} packed rows, but the sum of {formula} is {int(splits[-1])}"
            )
        frames = int(lengths[0].max())
        splits = splits.to(targets.device, non_blocking=True)
    else:
        logit_lengths = torch.where(splits[1:] <= rows, logit_lengths, 0)
        frames = rows
    if bounds is None:
        shape = (None, splits, frames, targets.shape[1] + 1)
        return LatticeRows(logit_lengths, target_lengths, *shape)
    start, s_range = bounds
    return LatticeRows(logit_lengths, target_lengths, start, splits, start.shape[1], s_range)
