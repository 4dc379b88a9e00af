"""The frames in which symbols are emitted: on the best path, of RNN-T or TDT, and on average, with
the delay relative to a reference.

Axes: N batch, T frames, U symbols, S band (S = U + 1 for a full lattice), D steps of the search,
K durations.

One recursion over steps serves all topologies of RNN-T (see `pruned_rnnt.loss`):

    best(d + 1, u) = max( best(d, u) + blank(d, u), best(d, u - 1) + emit(d, u - 1) )

For 'regular' the steps are antidiagonals, d = t + u, because a blank and a symbol both take one
step. For the other topologies they are frames, d = t, because a symbol also takes a frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pruned_rnnt.diagnostics.arguments import (
    checked_arcs,
    checked_bounds,
    checked_lengths,
    checked_occupancy,
)
from pruned_rnnt.diagnostics.log_prob_rows import TdtLogProbRows, checked_tdt_rows
from pruned_rnnt.loss.checks import (
    check_floating,
    check_has_values,
    check_rnnt_type,
    check_same,
    check_shape,
)

if TYPE_CHECKING:
    from pruned_rnnt.loss.results import Bounds, Occupancy, TdtOccupancy


class Alignment(NamedTuple):
    """The best path of each utterance.

    frames: (N, U) int32, the frame of each symbol; -1 for u >= U_n, and if there is no path.
    score: (N,), the log-probability of the path; -inf if there is no path.
    """

    frames: Tensor
    score: Tensor


class TdtAlignment(NamedTuple):
    """The best path of each utterance.

    frames, durations: (N, U) int32, the frame of each symbol and the frames by which it advances;
        -1 for u >= U_n, and if there is no path.
    score: (N,), the log-probability of the path; -inf if there is no path.
    """

    frames: Tensor
    durations: Tensor
    score: Tensor


class SymbolDelay(NamedTuple):
    """Times in frames; NaN for u >= U_n, and if there is no path.

    frames: (N, U), the expected emission frame of each symbol.
    delay: (N, U), frames minus the reference.
    mean: scalar, the mean delay over all symbols of the batch; NaN if there are none.
    """

    frames: Tensor
    delay: Tensor
    mean: Tensor


def viterbi_alignment(
    emit: Tensor,
    blank: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    *,
    bounds: Bounds | None = None,
    rnnt_type: str = "regular",
) -> Alignment:
    """The frame of each symbol on the most probable path; of equal paths, the earliest emissions.

    Args:
        emit, blank: (N, T, S) log-probabilities of emitting target u + 1 and of a blank in node
            (t, u), where u is the column, or start(t) + column in a band. Emissions of column U_n
            are ignored.
        logit_lengths, target_lengths: (N,), 1 <= T_n <= T.
        bounds: the band whose columns are given; None for a full lattice, S = U + 1.
        rnnt_type: 'regular', 'modified', 'constrained' or 'rna'.

    Returns:
        Alignment. The width of frames is that of the longest target with a band, else S - 1.

    Raises:
        TypeError, ValueError: name the argument that does not fit.
    """
    check_rnnt_type(rnnt_type)
    emit, blank = checked_arcs("", emit=emit, blank=blank)
    # A band does not say how many symbols there are.
    most = emit.shape[2] - 1 if bounds is None else torch.iinfo(torch.int32).max
    lengths = checked_lengths(emit, logit_lengths, target_lengths, symbols=most, least=0)
    frame_counts, symbol_counts = (x.long() for x in lengths)
    if bounds is not None:
        columns = max(int(symbol_counts.max()), 0) + 1
        emit = _unband(emit, bounds, columns)
        blank = _unband(blank, bounds, columns)
    # Lengths that are not read on the device: an utterance that does not fit has no path.
    fits = (frame_counts >= 0) & (frame_counts <= emit.shape[1])
    fits &= (symbol_counts >= 0) & (symbol_counts < emit.shape[2])
    frame_counts, symbol_counts = frame_counts.where(fits, 0), symbol_counts.where(fits, 0)
    emit = _without_forbidden_symbols(emit, blank, frame_counts, symbol_counts, rnnt_type)
    last_step = frame_counts
    if rnnt_type == "regular":
        emit, blank = _antidiagonals(emit), _antidiagonals(blank)
        last_step = frame_counts + symbol_counts
    score, moved = _search(emit[:, :, :-1], blank, last_step, symbol_counts)
    score = score.where(fits, -torch.inf)
    steps = _trace_back(moved, last_step, symbol_counts)
    if rnnt_type == "regular":
        # Step d = t + u emits symbol u in frame t.
        steps = steps - torch.arange(steps.shape[1], device=steps.device)
    has_path = (score > -torch.inf)[:, None] & (
        torch.arange(steps.shape[1], device=steps.device) < symbol_counts[:, None]
    )
    return Alignment(torch.where(has_path, steps, -1).to(torch.int32), score)


def _unband(rows_NTS: Tensor, bounds: Bounds, columns: int) -> Tensor:
    """Place the band's rows in the full lattice (N, T, columns); -inf outside the band."""
    checked_bounds(bounds, rows_NTS)
    if bounds.s_range != rows_NTS.shape[2]:
        raise ValueError(
            f"bounds has s_range={bounds.s_range}; emit and blank have {rows_NTS.shape[2]} columns"
        )
    offset = torch.arange(columns, device=rows_NTS.device) - bounds.start[:, :, None].long()
    inside = (offset >= 0) & (offset < bounds.s_range)
    values = rows_NTS.gather(2, offset.clamp(0, bounds.s_range - 1))
    return torch.where(inside, values, -torch.inf)


def _without_forbidden_symbols(
    emit_NTU: Tensor, blank_NTU: Tensor, frame_counts: Tensor, symbol_counts: Tensor, rnnt_type: str
) -> Tensor:
    """Emission weights, -inf if no symbol may be emitted; 'constrained' adds the blank above."""
    if rnnt_type == "constrained":
        next_blank = pad(blank_NTU[:, :, 1:], (0, 1), value=-torch.inf)
        emit_NTU = emit_NTU + next_blank
    # rna: the last transition is a blank, so the last frame cannot emit.
    usable_frames = frame_counts - 1 if rnnt_type == "rna" else frame_counts
    time = torch.arange(emit_NTU.shape[1], device=emit_NTU.device)
    column = torch.arange(emit_NTU.shape[2], device=emit_NTU.device)
    allowed = (time[None, :] < usable_frames[:, None])[:, :, None] & (
        column[None, :] < symbol_counts[:, None]
    )[:, None, :]
    return torch.where(allowed, emit_NTU, -torch.inf)


def _antidiagonals(rows_NTU: Tensor) -> Tensor:
    """(N, T, U + 1) -> (N, T + U, U + 1): element (d, u) is (t = d - u, u), -inf outside."""
    frame_count, columns = rows_NTU.shape[1:]
    steps = torch.arange(frame_count + columns - 1, device=rows_NTU.device)
    time = steps[:, None] - torch.arange(columns, device=rows_NTU.device)[None, :]
    inside = (time >= 0) & (time < frame_count)
    index = time.clamp(0, frame_count - 1)[None].expand(rows_NTU.shape[0], -1, -1)
    return torch.where(inside, rows_NTU.gather(1, index), -torch.inf)


def _search(
    emit_NDU: Tensor, blank_NDU: Tensor, last_step: Tensor, symbol_counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Best scores (N,), and moved (N, D, U + 1): True if a symbol leads to node (d + 1, u)."""
    batch, steps, columns = blank_NDU.shape
    best = blank_NDU.new_full((batch, columns), -torch.inf)
    best[:, 0] = 0.0
    score = blank_NDU.new_full((batch,), -torch.inf)
    moved = torch.zeros(batch, steps, columns, dtype=torch.bool, device=blank_NDU.device)
    for step in range(steps):
        by_blank = best + blank_NDU[:, step]
        by_symbol = pad(best[:, :-1] + emit_NDU[:, step], (1, 0), value=-torch.inf)
        moved[:, step] = by_symbol > by_blank
        best = torch.maximum(by_blank, by_symbol)
        final = best.gather(1, symbol_counts[:, None]).squeeze(1)
        score = torch.where(last_step == step + 1, final, score)
    return score, moved


def _trace_back(moved_NDU: Tensor, last_step: Tensor, symbol_counts: Tensor) -> Tensor:
    """(N, U) int64: the step in which each symbol was emitted on the best path."""
    batch, steps, columns = moved_NDU.shape
    emitted = torch.full((batch, columns), -1, device=moved_NDU.device)
    column = symbol_counts.clone()
    for step in range(steps - 1, -1, -1):
        by_symbol = moved_NDU[:, step].gather(1, column[:, None]).squeeze(1) & (step < last_step)
        column = column - by_symbol.long()
        here = torch.where(by_symbol, step, emitted.gather(1, column[:, None]).squeeze(1))
        emitted.scatter_(1, column[:, None], here[:, None])
    return emitted[:, : columns - 1]


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
    rows, durations = checked_tdt_rows(rows, durations)
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


def mean_symbol_delay(
    occupancy: Occupancy | TdtOccupancy,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    reference_frames: Tensor | None = None,
) -> SymbolDelay:
    """Expected emission frame of each symbol, sum_t t emit(t, u) / sum_t emit(t, u), and its delay.

    Args:
        occupancy: emit (N, T, U + 1), the posterior of emitting symbol u + 1 in frame t.
        logit_lengths, target_lengths: (N,).
        reference_frames: (N, U) floating, the true end of each symbol in (fractional) encoder
            frames; NaN if unknown: not the -1 of alignments. Default: frame 0 for all symbols.

    Returns:
        SymbolDelay. Multiply by the duration of an encoder frame for seconds.

    Raises:
        TypeError, ValueError: name the argument that does not fit.
    """
    occupancy = checked_occupancy(occupancy)
    logit_lengths, target_lengths = checked_lengths(
        occupancy.emit, logit_lengths, target_lengths, symbols=occupancy.emit.shape[2] - 1
    )
    emit_NTU = occupancy.emit[:, :, :-1]
    batch, frame_count, symbol_count = emit_NTU.shape
    if reference_frames is None:
        reference_frames = emit_NTU.new_zeros(batch, symbol_count)
    else:
        check_floating("reference_frames", reference_frames, "(N, U)", 2)
        check_shape("reference_frames", reference_frames, (batch, symbol_count), "(N, U)")
        if not reference_frames.is_cpu:
            check_same("reference_frames", reference_frames, "occupancy.emit", emit_NTU)
    device = emit_NTU.device
    time = torch.arange(frame_count, device=device)
    in_time = time[None, :] < logit_lengths[:, None]
    emit_NTU = torch.where(in_time[:, :, None], emit_NTU, 0.0)
    mass = emit_NTU.sum(dim=1)
    symbols = torch.arange(symbol_count, device=device)
    known = (symbols[None, :] < target_lengths[:, None]) & (mass > 0)
    expected = (emit_NTU * time[None, :, None]).sum(dim=1) / torch.where(known, mass, 1.0)
    frames = torch.where(known, expected, torch.nan)
    delay = frames - reference_frames.to(frames)
    return SymbolDelay(frames, delay, delay.nanmean())
