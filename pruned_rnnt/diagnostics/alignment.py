"""The best path through a transducer lattice: the frame in which each symbol is emitted.

Axes: N batch, T frames, U symbols, S band (S = U + 1 for a full lattice), D steps of the search.

One recursion over steps serves all topologies (see `pruned_rnnt.loss`):

    best(d + 1, u) = max( best(d, u) + blank(d, u), best(d, u - 1) + emit(d, u - 1) )

For 'regular' the steps are antidiagonals, d = t + u, because a blank and a symbol both take one
step. For the other topologies they are frames, d = t, because a symbol also takes a frame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.diagnostics.arguments import checked_arcs, checked_bounds, checked_lengths
from pruned_rnnt.loss.checks import check_rnnt_type

if TYPE_CHECKING:
    from pruned_rnnt.loss.results import Bounds


class Alignment(NamedTuple):
    """The best path of each utterance.

    frames: (N, U) int32, the frame of each symbol; -1 for u >= U_n, and if there is no path.
    score: (N,), the log-probability of the path; -inf if there is no path.
    """

    frames: Tensor
    score: Tensor


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
        next_blank = torch.nn.functional.pad(blank_NTU[:, :, 1:], (0, 1), value=-torch.inf)
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
        by_symbol = torch.nn.functional.pad(
            best[:, :-1] + emit_NDU[:, step], (1, 0), value=-torch.inf
        )
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
