"""The checks of what k2's functions take, in k2's argument names."""

from __future__ import annotations

from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.compat.package_names import named_as
from pruned_rnnt.loss import checks

in_names_of_k2 = named_as(
    {
        "targets": "symbols",
        "blank": "termination_symbol",
        "hat": "use_hat_loss",
        "logit_lengths": "boundary[:, 3]",
        "target_lengths": "boundary[:, 2]",
        "bounds": "ranges",
        "bounds.start": "ranges",
    }
)


class Symbols(NamedTuple):
    """columns: (B, S) int64 in 0..C-1. is_symbol: (B, S) bool, False where there was another
    number, which padding may have."""

    columns: Tensor
    is_symbol: Tensor

    def without_others(self, px: Tensor) -> Tensor:
        """px (B, S, T), for which other numbers have no arc."""
        return px.masked_fill(~self.is_symbol[:, :, None], -torch.inf)


def column_of(termination_symbol: int, scores: Tensor) -> int:
    """The column of a termination_symbol, which counts from the end if it is negative; of scores
    (B, ..., C) that are yet to be checked."""
    if (
        not isinstance(scores, Tensor)
        or not scores.dim()
        or not isinstance(termination_symbol, Integral)
        or isinstance(termination_symbol, bool)
    ):
        return termination_symbol
    size = scores.shape[-1]
    is_from_end = -size <= termination_symbol < 0
    return termination_symbol + size if is_from_end else termination_symbol


@in_names_of_k2
def checked_symbols(
    symbols: Tensor,
    termination_symbol: int,
    boundary: Tensor | None,
    shape: tuple[int, int],
    like: Tensor,
) -> Symbols:
    """Symbols (B, S) and a termination_symbol for scores (B, ..., C). On the CPU, a ValueError for
    other numbers inside of boundary."""
    check_symbols_and_boundary(symbols, boundary)
    checks.check_same("symbols", symbols, "the scores", like)
    checks.check_shape("symbols", symbols, shape, "(B, S)")
    size = like.shape[-1]
    checks.check_options(column_of(termination_symbol, like), size)
    is_symbol = (symbols >= 0) & (symbols < size)
    if checks.readable(False, symbols, boundary):
        inside = torch.ones_like(is_symbol)
        if boundary is not None:
            s = torch.arange(shape[1], device=symbols.device)
            inside = (s >= boundary[:, 0, None]) & (s < boundary[:, 2, None])
        n = checks.first_bad((inside & ~is_symbol).any(1))
        if n is not None:
            raise ValueError(
                f"symbols[{n}] is {symbols[n].tolist()}; symbols must be in 0..{size - 1}"
            )
    return Symbols(symbols.long().clamp(0, max(size - 1, 0)), is_symbol)


def check_symbols_and_boundary(symbols: Tensor, boundary: Tensor | None) -> None:
    """Dtypes, dimensions and devices."""
    checks.check_integers("symbols", symbols)
    checks.check_has_values("symbols", symbols, "k2's interface")
    if symbols.dim() != 2:
        raise ValueError(f"symbols has shape {tuple(symbols.shape)}; it must be (B, S)")
    if boundary is not None:
        check_boundary(boundary, "symbols", symbols)


def check_boundary(boundary: Tensor, name: str, other: Tensor) -> None:
    """(B, 4) integers for another argument (B, ...), on the CPU or its device."""
    checks.check_integers("boundary", boundary)
    checks.check_has_values("boundary", boundary, "k2's interface")
    checks.check_shape("boundary", boundary, (other.shape[0], 4), "(B, 4)")
    if not boundary.is_cpu:
        checks.check_same("boundary", boundary, name, other)


def check_ends(boundary: Tensor, symbols: int, frames: int) -> None:
    """ValueError for ends outside of 0..symbols and 0..frames, where they may be read; a box may be
    empty."""
    if checks.readable(False, boundary):
        ends = boundary[:, 2:]
        most = torch.tensor([symbols, frames], device=boundary.device)
        n = checks.first_bad(((ends < 0) | (ends > most)).any(1))
        if n is not None:
            raise ValueError(
                f"boundary[{n}] is {boundary[n].tolist()}; s_end must be in 0..{symbols} and t_end "
                f"in 0..{frames}"
            )


def check_ranges(ranges: Tensor, like: Tensor, symbols: Tensor | None = None) -> None:
    """(B, T, R) integers for (B, T, ...); with logits (B, T, R, C) and symbols (B, S) also in
    0..S."""
    checks.check_integers("ranges", ranges)
    checks.check_same("ranges", ranges, "the scores", like)
    if ranges.dim() != 3 or ranges.shape[2] == 0:
        raise ValueError(
            f"ranges has shape {tuple(ranges.shape)}; it must be (B, T, R), R at least 1"
        )
    if symbols is None:
        checks.check_shape("ranges", ranges, (*like.shape[:2], ranges.shape[2]), "(B, T, R)")
        return
    checks.check_shape("ranges", ranges, tuple(like.shape[:3]), "(B, T, R) by the shape of logits")
    checks.check_integers("symbols", symbols)
    last = symbols.shape[-1]
    if checks.readable(False, ranges):
        n = checks.first_bad(((ranges < 0) | (ranges > last)).flatten(1).any(1))
        if n is not None:
            raise ValueError(f"ranges[{n}] has a column outside of 0..{last}, those of symbols")
