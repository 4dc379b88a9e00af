"""Rows of lattice nodes: padded, or packed without padding, full lattice or band."""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.loss.checks import (
    check_integer,
    check_integers,
    check_same,
    check_shape,
    first_bad,
    has_values,
    known_lengths,
    readable,
)
from pruned_rnnt.loss.results import Bounds
from pruned_rnnt.ops.common.row_geometry import LatticeRows, packed_splits
from pruned_rnnt.ops.common.utterances import Utterances


def packed_row_splits(logit_lengths: Tensor, target_lengths: Tensor) -> Tensor:
    """Where each utterance's rows begin in packed logits (sum T_n (U_n+1), V).

    Args:
        logit_lengths, target_lengths: (N,) integers, on one device. Lengths below 0 are an error on
            the CPU, and count as 0 on other devices and in torch.compile.

    Returns:
        (N+1,) int64 on that device; the last element is the number of rows.

    Raises:
        TypeError: an argument that is not a tensor.
        ValueError: names the argument that does not fit.
    """
    given = {"logit_lengths": logit_lengths, "target_lengths": target_lengths}
    for name, lengths in given.items():
        check_integers(name, lengths)
        check_shape(name, lengths, (logit_lengths.numel(),), "(N,)")
        check_same(name, lengths, "logit_lengths", logit_lengths)
        if readable(False, lengths) and (n := first_bad(lengths < 0)) is not None:
            raise ValueError(f"{name}[{n}] is {int(lengths[n])}; it must be at least 0")
    return packed_splits(logit_lengths, target_lengths, None)


def row_splits_to_row_ids(row_splits: Tensor, row_count: int | None = None) -> Tensor:
    """The utterance of each packed row.

    Args:
        row_splits: (N+1,) integers that start at 0 and do not decrease.
        row_count: row_splits[-1] if it is known, which saves a synchronization with the device. It
            is compared with row_splits on the CPU; on other devices and in torch.compile, rows
            behind the last of row_splits count as the last utterance's.

    Returns:
        (R,) of the dtype of row_splits; utterance n has row_splits[n+1] - row_splits[n] rows.

    Raises:
        TypeError, ValueError: name the argument that does not fit. row_splits that decrease are
            found on the CPU, and without row_count on all devices.
        RuntimeError: row_splits without values and without row_count.
    """
    check_integers("row_splits", row_splits)
    if row_splits.dim() != 1 or row_splits.numel() < 1:
        raise ValueError(f"row_splits has shape {tuple(row_splits.shape)}; it must be (N+1,)")
    if row_count is None and not has_values(row_splits):
        raise RuntimeError("row_splits has no values (meta or FakeTensor); give row_count")
    if readable(row_count is None, row_splits) and (row_splits.diff() < 0).any():
        raise ValueError(f"row_splits is {row_splits.tolist()}; it must not decrease")
    if row_count is None:
        utterances = torch.arange(row_splits.numel() - 1).to(row_splits)
        return torch.repeat_interleave(utterances, row_splits.diff())
    row_count = check_integer("row_count", row_count)
    if row_count < 0:
        raise ValueError(f"row_count is {row_count}; it must be at least 0")
    if readable(False, row_splits) and row_count != int(row_splits[-1] - row_splits[0]):
        raise ValueError(f"row_count is {row_count}; it must be that of row_splits")
    # Not repeat_interleave: a wrong output_size ends the CUDA context of the process.
    rows = torch.arange(row_count, dtype=row_splits.dtype, device=row_splits.device)
    ends = row_splits[1:-1].contiguous()
    is_int32 = row_splits.dtype == torch.int32
    return torch.searchsorted(ends, rows + row_splits[0], right=True, out_int32=is_int32)


def given_packed_rows(
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
