"""k2's `get_rnnt_prune_ranges` and `do_rnnt_pruning`: which columns to keep, and keeping them.

Axes: B batch, S symbols, T frames, C channels, R kept columns.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

import pruned_rnnt
from pruned_rnnt.compat.k2_arguments import (
    check_boundary,
    check_ends,
    check_ranges,
    in_names_of_k2,
)
from pruned_rnnt.loss.checks import check_floating, check_integer, check_same
from pruned_rnnt.ops.common.library import MODIFIED, REGULAR, accumulator
from pruned_rnnt.ops.common.utterances import as_int32, lengths_on
from pruned_rnnt.ops.pruning.prune_bounds import prune_bounds


def get_rnnt_prune_ranges(
    px_grad: Tensor, py_grad: Tensor, boundary: Tensor, s_range: int
) -> Tensor:
    """The columns to keep in each frame, from occupation probabilities.

    s_range is raised to what the reference with the most symbols per frame needs ('regular'), with
    a warning that names the utterance the first time, and lowered to S + 1. Of windows whose scores
    differ by less than 1e-5 the middle one is taken, so that every device chooses the same and
    paths have room on both sides; k2 takes the largest. If a symbol takes a frame (not 'regular'),
    symbols count as well as blanks: k2 counts blanks alone, which say nothing about a frame that
    surely emits.

    Args:
        px_grad: (B, S, T + 1) or (B, S, T), py_grad: (B, S + 1, T), from return_grad.
        boundary: (B, 4) integers [s_begin, t_begin, s_end, t_end].
        s_range: columns to keep.

    Returns:
        (B, T, s_range) int64; ranges[b, t] counts up from the first kept column.

    Raises:
        ValueError: shapes that do not fit, or s_range below 2 ('regular') or 1.
    """
    is_regular, s_range = _checked(px_grad, py_grad, boundary, s_range)
    emit, blank = _in_rows(px_grad, py_grad)
    return _ranges(emit, blank, boundary, s_range, REGULAR if is_regular else MODIFIED)


def get_rnnt_prune_ranges_deprecated(
    px_grad: Tensor, py_grad: Tensor, boundary: Tensor, s_range: int
) -> Tensor:
    """`get_rnnt_prune_ranges` by k2's first rule: a window counts all symbols and blanks inside.

    Args, Returns and Raises: as `get_rnnt_prune_ranges`.
    """
    is_regular, s_range = _checked(px_grad, py_grad, boundary, s_range)
    emit, blank = _in_rows(px_grad, py_grad)
    if not is_regular:
        return _ranges(emit, blank, boundary, s_range, MODIFIED)
    # With no symbols to subtract, the regular score is the sum over the window.
    return _ranges(torch.zeros_like(emit), blank + emit, boundary, s_range, REGULAR)


def _checked(px_grad: Tensor, py_grad: Tensor, boundary: Tensor, s_range: int) -> tuple[bool, int]:
    """Whether px_grad is of the 'regular' type, and s_range as it is used."""
    for name, x in (("px_grad", px_grad), ("py_grad", py_grad)):
        check_floating(name, x, "(B, S, T + 1) or (B, S, T), and (B, S + 1, T)", 3)
    check_same("py_grad", py_grad, "px_grad", px_grad)
    check_boundary(boundary, "px_grad", px_grad)
    batch, symbol_count, last = px_grad.shape
    frame_count = py_grad.shape[2]
    if py_grad.shape != (batch, symbol_count + 1, frame_count) or last - frame_count not in (0, 1):
        raise ValueError(
            f"px_grad has shape {tuple(px_grad.shape)} and py_grad {tuple(py_grad.shape)}; they "
            "must be (B, S, T + 1) or (B, S, T), and (B, S + 1, T)"
        )
    check_ends(boundary, symbol_count, frame_count)
    s_range = check_integer("s_range", s_range)
    is_regular = last == frame_count + 1
    smallest = 2 if is_regular else 1
    if s_range < smallest:
        raise ValueError(
            f"s_range is {s_range}; it must be at least {smallest}, or no path is left"
        )
    if is_regular:
        s_range = _widened(s_range, boundary)
    return is_regular, min(s_range, symbol_count + 1)


def _in_rows(px_grad: Tensor, py_grad: Tensor) -> tuple[Tensor, Tensor]:
    """Occupancies of symbols (0 in the last column) and blanks, both (B, T, S + 1)."""
    dtype = torch.promote_types(accumulator(px_grad.dtype), accumulator(py_grad.dtype))
    px_grad, py_grad = (x.detach().to(dtype) for x in (px_grad, py_grad))
    emit = px_grad[:, :, : py_grad.shape[2]].transpose(1, 2)
    return torch.nn.functional.pad(emit, (0, 1)), py_grad.transpose(1, 2)


def _ranges(emit: Tensor, blank: Tensor, boundary: Tensor, s_range: int, kind: int) -> Tensor:
    """The ranges of a checked batch from occupancies in rows."""
    batch, frame_count, columns = blank.shape
    steps = torch.arange(s_range, device=blank.device)
    if s_range == columns:
        return steps.expand(batch, frame_count, s_range).contiguous()
    start = torch.empty(batch, frame_count, dtype=torch.int32, device=blank.device)
    prune_bounds(
        emit.contiguous(),
        blank.contiguous(),
        *lengths_on(blank.device, (boundary[:, 3], boundary[:, 2])),
        s_range,
        kind,
        True,  # k2 searches up to the padded S
        start,
    )
    return start.long().unsqueeze(2) + steps


@in_names_of_k2
def do_rnnt_pruning(am: Tensor, lm: Tensor, ranges: Tensor) -> tuple[Tensor, Tensor]:
    """The joiner's inputs at the kept columns.

    Args:
        am: (B, T, C) and lm: (B, S + 1, C).
        ranges: (B, T, R) integers from `get_rnnt_prune_ranges`.

    Returns:
        am and lm, each (B, T, R, C); am is a view.

    Raises:
        ValueError: as `pruned_rnnt.prune`.
    """
    check_floating("am", am, "(B, T, C)", 3)
    check_ranges(ranges, am)
    am_pruned, lm_pruned = pruned_rnnt.prune(am, lm, bounds_of_ranges(ranges))
    return am_pruned, lm_pruned


def bounds_of_ranges(ranges: Tensor) -> pruned_rnnt.Bounds:
    """k2's ranges are contiguous, so that their first column defines them."""
    return pruned_rnnt.Bounds(as_int32(ranges[:, :, 0]), ranges.shape[2])


def _widened(s_range: int, boundary: Tensor) -> int:
    """s_range, or more if references need it: ceil(S_n / T_n) + 1 columns. One without frames has
    no path in any."""
    symbols, frames = boundary[:, 2], boundary[:, 3]
    columns = (symbols + frames - 1) // frames.clamp_min(1) + 1
    most, n = columns.where(frames > 0, 0).max(0)
    needed = int(most)
    if s_range >= needed:
        return s_range
    if needed > _WARNED.get(s_range, 0):
        _WARNED[s_range] = needed
        warnings.warn(
            f"s_range={s_range} cannot reach the last symbol of utterance {int(n)}, which has "
            f"{int(symbols[n])} symbols in {int(frames[n])} frames: the whole batch uses s_range="
            f"{needed}, and the joiner's logits grow in proportion; leave such utterances out of "
            "the batch, or pass a larger s_range",
            stacklevel=4,
        )
    return needed


# The largest that was used in place of each s_range.
_WARNED: dict[int, int] = {}
