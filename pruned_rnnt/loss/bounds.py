"""The band of the pruned loss: choosing it, checking it, and cutting the joiner's inputs to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pruned_rnnt.loss import checks
from pruned_rnnt.loss.batch import Sizes, check_lengths
from pruned_rnnt.loss.durations import check_band_durations, check_durations_have_path
from pruned_rnnt.loss.results import Bounds, Occupancy, PrunedInputs, TdtOccupancy
from pruned_rnnt.ops.common.library import CONSTRAINED, MODIFIED, REGULAR, RNA
from pruned_rnnt.ops.common.utterances import HostLengths, Utterances, as_int32, lengths_on
from pruned_rnnt.ops.lattice.recursion import Recursion
from pruned_rnnt.ops.pruning.band_gather import gathered_band
from pruned_rnnt.ops.pruning.prune_bounds import OccupancyAndLengths, choose_bounds, tdt_bounds


def prune_bounds(
    occupancy: Occupancy | TdtOccupancy,
    logit_lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    s_range: int = 5,
    *,
    rnnt_type: str = "regular",
    durations: Sequence[int] | None = None,
    exact: bool = False,
    validate: bool = False,
) -> Bounds:
    """The s_range columns of each frame with the most probability (arXiv 2206.13236).

    The band starts at column 0, never moves down, moves up by at most s_range - 1 columns a frame
    (`regular`; else 1) and ends at the last column, so that it always has a path.

    Of a TDT lattice, the columns with the most probability among the paths that visit the frame;
    frames that durations skip take the columns of the last frame before them that paths visit.
    Without a duration of 0 the band moves up by one column a frame at most, so that a path of
    durations 0 (or 1) and 1 stays in it.

    Args:
        occupancy: of the simple loss; emit and blank (N, T, U+1), of any floating dtypes. Or the
            TdtOccupancy of a PrunedTransducerLoss with durations.
        logit_lengths, target_lengths: (N,) integers; default T and U.
        s_range: columns kept, at least 1, or 2 (`regular`, `constrained`). More than U+1 keeps
            everything.
        rnnt_type: that of the losses.
        durations: those of the loss whose TdtOccupancy this is, 1 among them; otherwise None.
        exact: choose the band that retains the most under these constraints, by dynamic
            programming, instead of adjusting the best window of each frame.
        validate: on other devices than the CPU, synchronize and check values as on the CPU;
            not in torch.compile, which refuses True.

    Returns:
        Bounds: start (N, T) int32 and s_range.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an argument that does not fit; on the CPU or with validate also an utterance
            without a band of that width, s_range < ceil(U_n / T_n) + 1 (`regular`).
    """
    emit, blank, stay, found = _checked_occupancy(occupancy, durations)
    kind = checks.check_rnnt_type(rnnt_type)
    exact = checks.check_flag("exact", exact)
    if found is not None and kind != REGULAR:
        raise ValueError(f"rnnt_type is {rnnt_type!r}; durations need rnnt_type='regular'")
    s_range = checks.check_s_range(s_range, kind)
    batch, frames, columns = emit.shape
    sizes = Sizes(batch, frames, columns - 1, 0, emit.device, "occupancy")
    both_lengths = (logit_lengths, target_lengths)
    lengths, numbers = check_lengths(*both_lengths, sizes, kind, validate)
    if numbers is not None:
        if found is not None:
            check_durations_have_path(numbers, found)
        if found is None or 0 in found:
            check_band_width(numbers, s_range, kind)
    lengths = lengths_on(emit.device, lengths)
    if found is None or stay is None:
        nodes = OccupancyAndLengths(emit, blank, *lengths)
        return Bounds(choose_bounds(nodes, s_range, kind, exact), s_range)
    occupancies = (emit, blank, stay)
    start = tdt_bounds(occupancies, lengths, s_range=s_range, durations=found, exact=exact)
    return Bounds(start, s_range)


def _checked_occupancy(
    occupancy: Occupancy | TdtOccupancy, durations: Sequence[int] | None
) -> tuple[Tensor, Tensor, Tensor | None, list[int] | None]:
    """emit and blank, and of a TdtOccupancy stay and the durations."""
    if isinstance(occupancy, TdtOccupancy):
        emit, blank, stay, arcs = occupancy
        emit, blank, stay = checks.check_occupancies(emit=emit, blank=blank, stay=stay)
        if durations is None:
            raise ValueError("durations is missing; a TdtOccupancy needs those of its loss")
        found = check_band_durations(durations)
        checks.check_floating("occupancy.durations", arcs, "(N, T, U+1, K)", 4)
        checks.check_same("occupancy.durations", arcs, "occupancy.emit", emit)
        meaning = "(N, T, U+1, K) with one column for each of durations"
        shape = (*emit.shape, len(found))
        checks.check_shape("occupancy.durations", arcs, shape, meaning)
        return emit, blank, stay, found
    if not isinstance(occupancy, tuple) or len(occupancy) != 2:
        raise TypeError(
            f"occupancy is a {type(occupancy).__name__}; it must be the occupancy that "
            "rnnt_loss_simple returns, two tensors emit and blank, or a TdtOccupancy"
        )
    if durations is not None:
        raise ValueError(
            f"durations is {durations}, but occupancy is not of a TDT loss; it must be the "
            "TdtOccupancy of a PrunedTransducerLoss with durations"
        )
    emit, blank = checks.check_occupancies(emit=occupancy[0], blank=occupancy[1])
    return emit, blank, None, None


def check_band_width(lengths: HostLengths, s_range: int, rnnt_type: int) -> None:
    """Every utterance has a band of that width. (Only `regular` needs the check: in other
    topologies every utterance that has a path also has a band.)"""
    frames_N, symbols_N = lengths
    # In nearly all batches this one comparison is enough.
    if rnnt_type != REGULAR or (s_range - 1) * min(frames_N) >= max(symbols_N):
        return
    for n, (frames, symbols) in enumerate(zip(frames_N, symbols_N, strict=True)):
        if (s_range - 1) * frames < symbols:
            raise ValueError(
                f"utterance {n} has no path: with {symbols} symbols in {frames} frames s_range "
                f"must be at least {-(-symbols // frames) + 1}, and is {s_range}"
            )


def check_bounds_type(bounds: Bounds) -> None:
    """TypeError unless bounds is a Bounds, for instance for k2's ranges, of a tensor and an
    integer."""
    if not isinstance(bounds, Bounds):
        raise TypeError(
            f"bounds is a {type(bounds).__name__}; it must be the Bounds that prune_bounds returns"
        )
    checks.check_tensor("bounds.start", bounds.start)
    checks.check_integer("s_range", bounds.s_range)


def check_bounds(
    bounds: Bounds,
    utterances: Utterances,
    frames: int | None,
    recursion: Recursion,
    validate: bool,
) -> Bounds:
    """bounds with start int32 and contiguous; if readable, checks that each band has a path."""
    start, s_range = bounds
    checks.check_integers("bounds.start", start)
    if start.dim() != 2:
        raise ValueError(f"bounds.start has shape {tuple(start.shape)}; it must be (N, T)")
    checks.check_last_axis("bounds.start", start)
    batch = utterances.targets.shape[0]
    frames = start.shape[1] if frames is None else frames
    checks.check_shape("bounds.start", start, (batch, frames), "(N, T)")
    checks.check_same("bounds.start", start, "targets", utterances.targets)
    rnnt_type = recursion.loss.rnnt_type
    s_range = checks.check_s_range(s_range, rnnt_type)
    start = as_int32(start)
    if checks.readable(validate, start):
        band, lengths = Bounds(start, s_range), utterances.on_device().lengths
        if recursion.tdt is not None and not recursion.ignores_durations:
            _check_tdt_paths(band, lengths, recursion.tdt.durations)
            return band
        n = checks.first_bad(~_has_path(start, *lengths, s_range, rnnt_type))
        if n is not None:
            raise ValueError(
                f"utterance {n} has no path inside bounds: its band of {s_range} columns must "
                f"start at column 0, stay connected, and reach column {int(lengths[1][n])} at "
                f"frame {int(lengths[0][n]) - 1}"
            )
    return Bounds(start, s_range)


def _check_tdt_paths(bounds: Bounds, lengths: tuple[Tensor, Tensor], durations: list[int]) -> None:
    """ValueError for an utterance without a path of these durations inside its band."""
    start, s_range = bounds
    open_N = torch.ones_like(lengths[0], dtype=torch.bool)
    if 1 in durations:
        # Nearly always there is a path of durations 0 (or 1) and 1, which takes less time to find.
        open_N = ~_has_path(start, *lengths, s_range, REGULAR if 0 in durations else RNA)
    for n in open_N.nonzero().flatten().tolist():
        frames, symbols = (int(x[n]) for x in lengths)
        if not _has_tdt_path(start[n, :frames].tolist(), symbols, s_range, durations):
            raise ValueError(
                f"utterance {n} has no path inside bounds: in its band of {s_range} columns, arcs "
                f"of the durations {durations} must lead from column 0 of frame 0 to column "
                f"{symbols} and the end of frame {frames - 1}"
            )


def _has_tdt_path(start_T: list[int], symbols: int, s_range: int, durations: list[int]) -> bool:
    """Of one utterance, whose frames are those of start_T."""
    frames = len(start_T)
    # Bit u of reached_T[t]: paths lead to the node (t, u).
    reached_T = [1] + [0] * (frames - 1)
    for t, start in enumerate(start_T):
        high = min(start + s_range - 1, symbols)
        if not 0 <= start <= high:
            continue  # A frame that begins before column 0 has no nodes in the recursion.
        band = (2 << high) - (1 << start)
        here = reached_T[t] & band
        if 0 in durations:
            # Symbols lead from the lowest column to all above it.
            here = band & -(here & -here)
        for duration in durations:
            if duration > 0 and t + duration < frames:
                reached_T[t + duration] |= here | here << 1
            elif t + duration == frames and here >> symbols & 1:
                return True
    return False


def _has_path(
    start: Tensor, logit_lengths: Tensor, target_lengths: Tensor, s_range: int, rnnt_type: int
) -> Tensor:
    """(N,) bool. The columns that paths can be in at a frame are an interval low..high."""
    t = torch.arange(start.shape[1], device=start.device)
    top = start + (s_range - 1)
    low = start.cummax(1).values
    # A frame is entered by a blank, at a column of both bands (`constrained` also by a symbol
    # whose blank is in the band), or by a symbol from the column below.
    entry = torch.cat([top[:, :1], torch.minimum(top[:, 1:], top[:, :-1])], 1)
    if rnnt_type == REGULAR:
        high, meets = top, low <= entry
    else:
        cap = entry if rnnt_type == CONSTRAINED else top
        high = ((cap - t).cummin(1).values + t).minimum(t)
        meets = low <= high
    last = (logit_lengths - 1).clamp(0, start.shape[1] - 1).long()[:, None]
    low_N, high_N, top_N = (x.gather(1, last)[:, 0] for x in (low, high, top))
    arrives = (low_N <= target_lengths) & (target_lengths <= high_N)
    if rnnt_type in (MODIFIED, CONSTRAINED):
        # The last frame may be left by the last symbol.
        below = (low_N < target_lengths) & (target_lengths <= high_N + 1)
        arrives |= below if rnnt_type == MODIFIED else below & (target_lengths <= top_N)
    connected = ((meets & (start >= 0)) | (t >= logit_lengths[:, None])).all(1)
    return (start[:, 0] == 0) & connected & arrives


def prune(am: Tensor, lm: Tensor, bounds: Bounds) -> PrunedInputs:
    """The joiner's inputs at the columns of the band.

    Args:
        am: (N, T, D) and lm: (N, U+1, D'), floating; D and D' may differ.
        bounds: of prune_bounds.

    Returns:
        PrunedInputs: am (N, T, S, D), a view, and lm (N, T, S, D') with
        lm[n, t, j] = lm[n, start[n, t] + j], zeros beyond U.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: shapes, dtypes or devices that do not fit.
    """
    checks.check_floating("am", am, "(N, T, D)", 3)
    checks.check_floating("lm", lm, "(N, U+1, D)", 3)
    checks.check_same("lm", lm, "am", am)
    check_bounds_type(bounds)
    checks.check_integers("bounds.start", bounds.start)
    shape = tuple(am.shape[:2])
    checks.check_shape("bounds.start", bounds.start, shape, "(N, T) by the shape of am")
    checks.check_same("bounds.start", bounds.start, "am", am)
    if lm.shape[0] != am.shape[0]:
        raise ValueError(f"lm has {lm.shape[0]} utterances but am {am.shape[0]}")
    if lm.shape[1] == 0:
        raise ValueError(f"lm has shape {tuple(lm.shape)}; it must have a row for u = 0")
    s_range = checks.check_s_range(bounds.s_range, MODIFIED)
    start = as_int32(bounds.start)
    am_NTSD = am[:, :, None, :].expand(-1, -1, s_range, -1)
    return PrunedInputs(am_NTSD, gathered_band(lm.contiguous(), start, s_range))
