"""Log-probabilities of the arcs of an RNN-T or TDT lattice, from a joiner's logits, and their
occupancies.

Axes: N batch, T frames, U symbols, S columns per frame (U + 1, or s_range of a band), V vocabulary,
K durations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pruned_rnnt.diagnostics.arguments import (
    check_durations_of_nodes,
    checked_arcs,
    checked_bounds,
    checked_lengths,
    checked_rows,
    in_one_precision,
)
from pruned_rnnt.loss import checks
from pruned_rnnt.loss.batch import check_symbols
from pruned_rnnt.loss.durations import check_durations, tdt_recursion
from pruned_rnnt.loss.mutual_information import mutual_information
from pruned_rnnt.loss.results import Occupancy, TdtOccupancy
from pruned_rnnt.ops.common.library import accumulator
from pruned_rnnt.ops.common.row_geometry import LatticeRows
from pruned_rnnt.ops.common.utterances import as_int32
from pruned_rnnt.ops.joiner.log_probs import log_probs
from pruned_rnnt.ops.lattice.recursion import run_recursion

if TYPE_CHECKING:
    from pruned_rnnt.loss.results import Bounds


class LogProbRows(NamedTuple):
    """emit, blank: (N, T, S) log-probabilities without gradient, -inf for missing arcs."""

    emit: Tensor
    blank: Tensor


class TdtLogProbRows(NamedTuple):
    """emit, blank: (N, T, U + 1) log-probabilities without gradient, -inf for missing arcs;
    durations: (N, T, U + 1, K), those of the durations in each node."""

    emit: Tensor
    blank: Tensor
    durations: Tensor


@torch.no_grad()
def log_prob_rows(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    *,
    bounds: Bounds | None = None,
    blank: int = 0,
    from_log_probs: bool = False,
    hat: bool = False,
) -> LogProbRows:
    """Log-probabilities of the next symbol and of blank in every node.

    Args:
        logits: (N, T, S, V), of any floating dtype.
        targets: (N, U) integers; logit_lengths, target_lengths: (N,).
        bounds: the band whose columns are given; None for a full lattice, S = U + 1.
        blank, from_log_probs, hat: as in `pruned_rnnt.rnnt_loss`.

    Returns:
        LogProbRows, in float64 for float64 logits, else in float32.

    Raises:
        TypeError, ValueError: as `pruned_rnnt.rnnt_loss`.
    """
    checks.check_floating("logits", logits, "(N, T, S, V)", 4)
    checks.check_last_axis("logits", logits)
    batch, frames, columns, size = logits.shape
    options = checks.check_options(blank, size, hat=hat, from_log_probs=from_log_probs)
    checks.check_integers("targets", targets)
    checks.check_same("targets", targets, "logits", logits)
    start = None
    if bounds is None:
        checks.check_shape(
            "targets", targets, (batch, columns - 1), "(N, U) by the shape of logits"
        )
    else:
        start = as_int32(checked_bounds(bounds, logits).start)
        shape = (batch, frames, bounds.s_range, size)
        checks.check_shape("logits", logits, shape, "(N, T, S, V) with bounds.s_range for S")
        checks.check_shape("targets", targets, (batch, *targets.shape[1:2]), "(N, U)")
    symbols = targets.shape[1]
    # A batch may be taken a few frames at a time, of which an utterance has none.
    given = (logits, logit_lengths, target_lengths)
    lengths = checked_lengths(*given, symbols=symbols, least=0)
    if symbols > 0 and checks.readable(False, targets, *lengths):
        check_symbols(targets, lengths[1], size, options.blank)
    emit, blanks, scratch = (
        torch.empty((batch, frames, columns), dtype=accumulator(logits.dtype), device=logits.device)
        for _ in range(3)
    )
    log_probs(
        logits.reshape(-1, size).contiguous(),
        as_int32(targets),
        *lengths,
        start,
        None,
        frames,
        columns,
        0,
        options.blank,
        options.normalization,
        emit.view(-1),
        blanks.view(-1),
        scratch.view(-1),
    )
    return LogProbRows(emit, blanks)


@torch.no_grad()
def occupancy_of_rows(
    rows: LogProbRows,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    *,
    rnnt_type: str = "regular",
) -> Occupancy:
    """The posterior probability of each arc of a full lattice.

    Args:
        rows: (N, T, U + 1), from `log_prob_rows` without a band.
        logit_lengths, target_lengths: (N,), 1 <= T_n <= T.
        rnnt_type: as in `pruned_rnnt.rnnt_loss`.

    Raises:
        TypeError, ValueError: name the argument that does not fit.
    """
    rows = checked_rows(rows, LogProbRows)
    emit, blank = checked_arcs("rows.", emit=rows.emit, blank=rows.blank)
    frames, symbols = checked_lengths(
        emit, logit_lengths, target_lengths, symbols=emit.shape[2] - 1
    )
    # Rows of a longer padded lattice may have arcs there.
    after_NT = torch.arange(emit.shape[1], device=emit.device) >= frames[:, None]
    px = emit.masked_fill(after_NT[:, :, None], -torch.inf)[:, :, :-1].transpose(1, 2)
    if rnnt_type == "regular":
        px = pad(px, (0, 1), value=-torch.inf)
    begin = torch.zeros_like(frames)
    boundary = torch.stack((begin, begin, symbols, frames), dim=1)
    found = mutual_information(px, blank.transpose(1, 2), boundary, rnnt_type=rnnt_type)
    emit_NTU = found.occupancy.emit[:, :, : emit.size(1)].transpose(1, 2)
    return Occupancy(pad(emit_NTU, (0, 1)), found.occupancy.blank.transpose(1, 2))


@torch.no_grad()
def tdt_log_prob_rows(
    logits: Tensor,
    duration_logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int = 0,
) -> TdtLogProbRows:
    """Log-probabilities of the next symbol, of blank, and of the durations in every node.

    Args:
        logits: (N, T, U + 1, V) and duration_logits: (N, T, U + 1, K), of any floating dtype.
        Remaining arguments: see `log_prob_rows`.

    Raises:
        TypeError, ValueError: as `pruned_rnnt.rnnt_loss_tdt`.
    """
    lengths = (logit_lengths, target_lengths)
    rows = log_prob_rows(logits, targets, *lengths, blank=blank)
    check_durations_of_nodes("duration_logits", duration_logits, rows.emit)
    return TdtLogProbRows(*rows, duration_logits.to(rows.emit.dtype).log_softmax(-1))


@torch.no_grad()
def occupancy_of_tdt_rows(
    rows: TdtLogProbRows,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    *,
    durations: Sequence[int],
) -> TdtOccupancy:
    """The posterior probability of each arc of a whole lattice.

    Args:
        rows: from `tdt_log_prob_rows`.
        logit_lengths, target_lengths: (N,), 1 <= T_n <= T.
        durations: of the K columns.

    Raises:
        TypeError, ValueError: name the argument that does not fit.
    """
    rows, durations = checked_tdt_rows(rows, durations)
    frames_N, symbols_N = checked_lengths(
        rows.emit, logit_lengths, target_lengths, symbols=rows.emit.shape[2] - 1
    )
    device = rows.emit.device
    frames, columns = rows.emit.shape[1:]
    geometry = LatticeRows(frames_N, symbols_N, None, None, frames, columns)
    recursion = tdt_recursion(checks.check_options(0, 2), durations)
    # The recursion takes rows without arcs beyond the last symbol.
    is_symbol = torch.arange(columns, device=device) < symbols_N[:, None]
    emit = rows.emit.masked_fill(~is_symbol[:, None, :], -torch.inf)
    emit, blank, log_durations = (x.contiguous() for x in (emit, *rows[1:]))
    sums = run_recursion(emit, blank, geometry, recursion, log_durations, symbols=columns - 1)
    return TdtOccupancy(*sums[1:])


def lattice_occupancy(
    rows: LogProbRows | TdtLogProbRows,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    *,
    rnnt_type: str = "regular",
    durations: Sequence[int] = (),
) -> Occupancy | TdtOccupancy:
    """`occupancy_of_rows`, or `occupancy_of_tdt_rows` for rows with durations.

    Raises:
        TypeError, ValueError: as these two; durations for rows without them, or an rnnt_type other
            than `regular` for rows with them.
    """
    lengths = logit_lengths, target_lengths
    if isinstance(rows, TdtLogProbRows):
        if rnnt_type != "regular":
            raise ValueError(f"rnnt_type is {rnnt_type!r}; durations need rnnt_type='regular'")
        return occupancy_of_tdt_rows(rows, *lengths, durations=durations)
    if len(durations) > 0:
        raise ValueError(
            f"durations is {durations}, but rows are not of a TDT lattice; they must be those of "
            "tdt_log_prob_rows"
        )
    return occupancy_of_rows(rows, *lengths, rnnt_type=rnnt_type)


def checked_tdt_rows(
    rows: TdtLogProbRows, durations: Sequence[int]
) -> tuple[TdtLogProbRows, Sequence[int]]:
    """Rows in one precision, and the durations of their columns."""
    rows = checked_rows(rows, TdtLogProbRows)
    found = check_durations(durations)
    emit, blank = checked_arcs("rows.", emit=rows.emit, blank=rows.blank)
    check_durations_of_nodes("rows.durations", rows.durations, emit, len(found))
    return TdtLogProbRows(*in_one_precision(emit, blank, rows.durations)), found
