"""The probability mass that the pruning band keeps, and whether the band is wide enough.

Axes: N batch, T frames, U symbols, S band. Occupancies are rows (N, T, U + 1): `emit` and `blank`
hold the posterior probability that a path takes that arc out of node (t, u).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.diagnostics.arguments import (
    checked_bounds,
    checked_lengths,
    checked_occupancy,
)
from pruned_rnnt.loss.checks import check_has_values, check_rnnt_type
from pruned_rnnt.loss.results import Bounds, Occupancy, TdtOccupancy

# Columns cover a frame if they have all but this share of its mass.
_TAIL = 1e-3
# A suggested width covers this share of the frames.
_COVERED_FRAMES = 0.99
# With more than this share of the mass on its edges, the band is too narrow.
_EDGE_LIMIT = 0.02


class RetainedMass(NamedTuple):
    """Kept shares in [0, 1], each (N,): of all arcs, of the emit arcs, of the blank arcs.

    NaN for an utterance whose occupancy has NaNs, and for one without a path, whose occupancy is 0.
    """

    total: Tensor
    emit: Tensor
    blank: Tensor


class BandEdgeMass(NamedTuple):
    """Mass on the first and last columns of the band, if the lattice continues beyond them.

    lower, upper: (N,), the share of the band's mass on its first and last column; NaN as in
        RetainedMass.
    needed_s_range: the width that has 99.9% of the mass in 99% of the frames of the batch, without
        those utterances; 1 if there are no others.
    advice: a sentence that recommends an s_range, after one that counts those utterances.
    """

    lower: Tensor
    upper: Tensor
    needed_s_range: int
    advice: str


def retained_mass(
    occupancy: Occupancy | TdtOccupancy,
    bounds: Bounds,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    *,
    rnnt_type: str = "regular",
) -> RetainedMass:
    """The share of the probability mass whose arcs are inside the band.

    An arc is kept if both of its nodes are in the band, as in the pruned recursion. 1 means that
    pruning has no effect; 1 - `emit` is the mean share of symbols whose emission is cut. The
    occupancy of a TDT lattice does not say where the arcs above duration 0 land: of these, the arcs
    that leave a node in the band are counted.

    Args:
        occupancy: of the full lattice, such as from `rnnt_loss_simple` or `PrunedTransducerLoss`;
            emit, blank (N, T, U + 1).
        bounds: the band, start (N, T) and s_range.
        logit_lengths, target_lengths: (N,).
        rnnt_type: topology of the loss that gave the occupancy.

    Returns:
        RetainedMass. An utterance without symbols has emit = 1.

    Raises:
        TypeError, ValueError: name the argument that does not fit.
    """
    occupancy = checked_occupancy(occupancy)
    check_rnnt_type(rnnt_type)
    symbols = occupancy.emit.shape[2] - 1
    lengths = checked_lengths(occupancy.emit, logit_lengths, target_lengths, symbols=symbols)
    logit_lengths = lengths[0]
    valid = _valid_nodes(occupancy.emit, *lengths)
    inside = _band_nodes(occupancy.emit, checked_bounds(bounds, occupancy.emit))
    if not isinstance(occupancy, TdtOccupancy):
        return _retained(occupancy, valid, inside, logit_lengths, rnnt_type)
    stay, emit, blank = (
        torch.where(valid, x, 0.0) for x in (occupancy.stay, occupancy.emit, occupancy.blank)
    )
    arcs = torch.cat((stay, emit - stay, blank), dim=2)
    stay_kept = inside & _next_column(inside)
    symbols = 2 * stay.shape[2]
    kept = torch.cat((stay_kept, inside, inside), dim=2)
    empty = _empty(arcs, 1.0)
    return RetainedMass(
        _share(arcs, kept, empty),
        _share(arcs[:, :, :symbols], kept[:, :, :symbols], empty),
        _share(blank, inside, empty),
    )


def _retained(
    occupancy: Occupancy, valid: Tensor, inside: Tensor, logit_lengths: Tensor, rnnt_type: str
) -> RetainedMass:
    # Arcs of the last frame end in the final node, which is always kept.
    frames = torch.arange(occupancy.emit.shape[1], device=inside.device)
    is_last = (frames[None, :] >= logit_lengths[:, None] - 1)[:, :, None]
    blank_kept = inside & (_next_frame(inside) | is_last)
    emit_kept = inside
    emit = torch.where(valid, occupancy.emit, 0.0)
    blank = torch.where(valid, occupancy.blank, 0.0)
    if rnnt_type == "constrained":
        # The blank that follows a symbol is part of the symbol's arc, which visits (t, u + 1).
        blank = blank - torch.nn.functional.pad(emit[:, :, :-1], (1, 0))
    if rnnt_type in ("regular", "constrained"):
        emit_kept = emit_kept & _next_column(inside)
    if rnnt_type != "regular":
        emit_kept = emit_kept & (_next_column(_next_frame(inside)) | is_last)
    arcs, kept = torch.cat((emit, blank), dim=2), torch.cat((emit_kept, blank_kept), dim=2)
    empty = _empty(arcs, 1.0)
    return RetainedMass(
        _share(arcs, kept, empty),
        _share(emit, emit_kept, empty),
        _share(blank, blank_kept, empty),
    )


def band_edge_mass(
    occupancy: Occupancy | TdtOccupancy,
    bounds: Bounds,
    logit_lengths: Tensor,
    target_lengths: Tensor,
) -> BandEdgeMass:
    """Mass on the edges of the band; if it is large, the band cuts probable paths.

    An edge counts only if the lattice continues beyond it: the first column if start > 0, the last
    column if it is below U_n.

    Args:
        occupancy: of the full lattice; emit, blank (N, T, U + 1).
        bounds: the band, start (N, T) and s_range.
        logit_lengths, target_lengths: (N,).

    Returns:
        BandEdgeMass, with a recommendation for s_range.

    Raises:
        TypeError, ValueError: name the argument that does not fit.
    """
    occupancy = checked_occupancy(occupancy)
    check_has_values("occupancy.emit", occupancy.emit, "band_edge_mass")
    symbols = occupancy.emit.shape[2] - 1
    lengths = checked_lengths(occupancy.emit, logit_lengths, target_lengths, symbols=symbols)
    valid = _valid_nodes(occupancy.emit, *lengths)
    node_NTU = torch.where(valid, occupancy.emit + occupancy.blank, 0.0)
    inside = _band_nodes(occupancy.emit, checked_bounds(bounds, occupancy.emit))
    columns = torch.arange(node_NTU.shape[2], device=node_NTU.device)
    start = bounds.start[:, :, None]
    top = start + bounds.s_range - 1
    last_symbol = lengths[1][:, None, None]
    empty = _empty(node_NTU, 0.0)
    lower = _share(node_NTU * inside, (columns == start) & (start > 0), empty)
    upper = _share(node_NTU * inside, (columns == top) & (top < last_symbol), empty)
    edge_N = lower + upper
    known = ~edge_N.isnan()
    needed = _needed_s_range(node_NTU[known])
    advice = []
    if not bool(known.all()):
        advice.append(
            f"{int((~known).sum())} of {len(known)} utterances have no path or NaN probabilities, "
            "and are left out: check their inputs and lengths."
        )
    if bool(known.any()):
        advice.append(_advice(bounds.s_range, float(edge_N[known].mean()), needed))
    return BandEdgeMass(lower, upper, needed, " ".join(advice))


def _advice(s_range: int, edge: float, needed: int) -> str:
    if edge > _EDGE_LIMIT and needed > s_range:
        return (
            f"s_range={s_range} is too small: {edge:.1%} of the probability lies on the edge of "
            f"the band; {_COVERED_FRAMES:.0%} of the frames need {needed} columns, "
            f"try s_range={needed}."
        )
    if needed + 2 <= s_range and edge <= _EDGE_LIMIT:
        # The suggestion has one spare column for other batches.
        return (
            f"s_range={s_range} is larger than needed: {edge:.1%} of the probability lies on the "
            f"edge of the band; s_range={needed + 1} covers {_COVERED_FRAMES:.0%} of the frames "
            "and is faster."
        )
    return f"s_range={s_range} fits: {edge:.1%} of the probability lies on the edge of the band."


def _needed_s_range(node_NTU: Tensor) -> int:
    """The smallest width that covers all but a small tail of the mass in nearly every frame."""
    total = node_NTU.sum(dim=2)
    frames = total > 0
    if not bool(frames.any()):
        return 1
    share = node_NTU / total.clamp_min(torch.finfo(total.dtype).tiny)[:, :, None]
    cumulative = share.cumsum(dim=2)
    first = (cumulative < _TAIL / 2).sum(dim=2)
    last = (cumulative < 1 - _TAIL / 2).sum(dim=2).clamp_max(node_NTU.shape[2] - 1)
    width = (last - first + 1)[frames].to(torch.float64)
    return int(torch.quantile(width, _COVERED_FRAMES, interpolation="higher"))


def _valid_nodes(rows_NTU: Tensor, logit_lengths: Tensor, target_lengths: Tensor) -> Tensor:
    """(N, T, U + 1) bool: t < T_n and u <= U_n."""
    device = rows_NTU.device
    frames = torch.arange(rows_NTU.shape[1], device=device)
    columns = torch.arange(rows_NTU.shape[2], device=device)
    in_time = frames[None, :] < logit_lengths[:, None]
    in_text = columns[None, :] <= target_lengths[:, None]
    return in_time[:, :, None] & in_text[:, None, :]


def _band_nodes(rows_NTU: Tensor, bounds: Bounds) -> Tensor:
    """(N, T, U + 1) bool: start(t) <= u < start(t) + S."""
    columns = torch.arange(rows_NTU.shape[2], device=rows_NTU.device)
    offset = columns - bounds.start[:, :, None]
    return (offset >= 0) & (offset < bounds.s_range)


def _next_frame(mask_NTU: Tensor) -> Tensor:
    """The mask at (t + 1, u); of the last frame itself, whose arcs end in the final node."""
    # Padded with False, torch.compile writes C++ that no compiler accepts.
    return torch.cat((mask_NTU[:, 1:], mask_NTU[:, -1:]), dim=1)


def _next_column(mask_NTU: Tensor) -> Tensor:
    """The mask at (t, u + 1); False beyond the last column."""
    return torch.nn.functional.pad(mask_NTU[:, :, 1:], (0, 1))


def _empty(mass: Tensor, share: float) -> Tensor:
    """(N,), the share of an utterance that has a path, but none of the mass in question; NaN for
    the others, and for those with NaNs among their mass (N, T, ...)."""
    total = mass.sum(dim=(1, 2))
    return torch.full_like(total, share).masked_fill(~(total > 0), torch.nan)


def _share(mass: Tensor, kept: Tensor, empty: Tensor) -> Tensor:
    """Kept mass over all mass, (N,); `empty` (N,) if there is no mass, or if it is NaN."""
    total = mass.sum(dim=(1, 2))
    part = torch.where(kept, mass, 0.0).sum(dim=(1, 2))
    share = part / total.clamp_min(torch.finfo(total.dtype).tiny)
    return torch.where((total > 0) & ~empty.isnan(), share, empty)
