"""Log-probabilities, occupancies and best paths of the lattices of token-and-duration transducers.

Axes: N batch, T frames, U symbols, V vocabulary, K durations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pruned_rnnt.diagnostics.arguments import (
    check_durations_of_nodes,
    checked_arcs,
    checked_lengths,
    checked_rows,
    in_one_precision,
)
from pruned_rnnt.diagnostics.log_prob_rows import LogProbRows, log_prob_rows, occupancy_of_rows
from pruned_rnnt.loss.checks import check_has_values, check_options
from pruned_rnnt.loss.durations import check_durations, tdt_recursion
from pruned_rnnt.loss.results import Occupancy, TdtOccupancy
from pruned_rnnt.ops.common.row_geometry import LatticeRows
from pruned_rnnt.ops.lattice.recursion import run_recursion


class TdtLogProbRows(NamedTuple):
    """emit, blank: (N, T, U + 1) log-probabilities without gradient, -inf for missing arcs;
    durations: (N, T, U + 1, K), those of the durations in each node."""

    emit: Tensor
    blank: Tensor
    durations: Tensor


class TdtAlignment(NamedTuple):
    """The best path of each utterance.

    frames, durations: (N, U) int32, the frame of each symbol and the frames by which it advances;
        -1 for u >= U_n, and if there is no path.
    score: (N,), the log-probability of the path; -inf if there is no path.
    """

    frames: Tensor
    durations: Tensor
    score: Tensor


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
    rows, durations = _checked(rows, durations)
    frames_N, symbols_N = checked_lengths(
        rows.emit, logit_lengths, target_lengths, symbols=rows.emit.shape[2] - 1
    )
    device = rows.emit.device
    frames, columns = rows.emit.shape[1:]
    geometry = LatticeRows(frames_N, symbols_N, None, None, frames, columns)
    recursion = tdt_recursion(check_options(0, 2), durations)
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


@torch.no_grad()
def tdt_viterbi_alignment(
    rows: TdtLogProbRows,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    *,
    durations: Sequence[int],
) -> TdtAlignment:
    """The frame and the duration of each symbol on the most probable path.

    Args:
        rows: from `tdt_log_prob_rows`.
        logit_lengths, target_lengths: (N,), 1 <= T_n <= T.
        durations: of the K columns.

    Returns:
        TdtAlignment, U wide.

    Raises:
        TypeError, ValueError: name the argument that does not fit.
    """
    rows, durations = _checked(rows, durations)
    check_has_values("rows.emit", rows.emit, "tdt_viterbi_alignment")
    frames_N, symbols_N = checked_lengths(
        rows.emit,
        logit_lengths,
        target_lengths,
        symbols=rows.emit.shape[2] - 1,
        least=0,
        validate=True,
    )
    best_NTU, arc_NTU = _best_arcs(rows, frames_N, durations)
    ends = zip(frames_N.tolist(), symbols_N.tolist(), strict=True)
    size, _, columns = rows.emit.shape
    emitted = torch.full((2, size, columns - 1), -1, dtype=torch.int32, device="cpu")
    scores = []
    for n, (t, u) in enumerate(ends):
        # Without a frame there is no path.
        scores.append(best_NTU[n, t, u] if t > 0 else best_NTU.new_full((), -torch.inf))
        if scores[-1] > -torch.inf:
            arcs = arc_NTU[n, : t + 1, : u + 1].cpu().numpy()
            while (t, u) != (0, 0):
                is_blank, index = divmod(int(arcs[t, u]), len(durations))
                t -= durations[index]
                if not is_blank:
                    u -= 1
                    emitted[0, n, u], emitted[1, n, u] = t, durations[index]
    frames_NU, durations_NU = emitted.to(rows.emit.device).unbind()
    return TdtAlignment(frames_NU, durations_NU, torch.stack(scores))


def _checked(
    rows: TdtLogProbRows, durations: Sequence[int]
) -> tuple[TdtLogProbRows, Sequence[int]]:
    """Rows in one precision, and the durations of their columns."""
    rows = checked_rows(rows, TdtLogProbRows)
    found = check_durations(durations)
    emit, blank = checked_arcs("rows.", emit=rows.emit, blank=rows.blank)
    check_durations_of_nodes("rows.durations", rows.durations, emit, len(found))
    return TdtLogProbRows(*in_one_precision(emit, blank, rows.durations)), found


def _best_arcs(
    rows: TdtLogProbRows, frames_N: Tensor, durations: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The score (N, T+1, U+1) of the best path to each node, where (T_n, U_n) is the end, and the
    last arc of that path: the index of its duration, plus K for a blank."""
    longest = max(durations)
    # Frames before the first one, a frame for the end, and a column before the first one.
    around = (1, 0, longest, 1)
    emit, blank = (pad(x, around, value=-torch.inf) for x in (rows.emit, rows.blank))
    log_durations = pad(rows.durations, (0, 0, *around), value=-torch.inf)
    best = torch.full_like(emit, -torch.inf)
    best[:, longest, 1] = 0.0
    arc = torch.zeros(best.shape, dtype=torch.uint8, device=best.device)
    frames, columns = rows.emit.shape[1] + 1, rows.emit.shape[2]
    u_all = torch.arange(columns, device=best.device)
    # Every arc leads to a later anti-diagonal.
    for k in range(1, frames + columns - 1):
        u = u_all[max(0, k + 1 - frames) : k + 1]
        t = k - u
        before_end = t < frames_N[:, None]
        symbols, blanks = [], []
        for n, duration in enumerate(durations):
            source = t + longest - duration
            by_symbol = best[:, source, u] + emit[:, source, u] + log_durations[:, source, u, n]
            symbols.append(by_symbol.masked_fill(~before_end, -torch.inf))
            source_arc = best[:, source, u + 1] + blank[:, source, u + 1]
            by_blank = source_arc + log_durations[:, source, u + 1, n]
            blanks.append(by_blank if duration > 0 else torch.full_like(by_blank, -torch.inf))
        score, index = torch.stack(symbols + blanks).max(0)
        best[:, t + longest, u + 1] = score
        arc[:, t + longest, u + 1] = index.to(torch.uint8)
    return best[:, longest:, 1:], arc[:, longest:, 1:]
