"""The checks of the arguments that the diagnostics share."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from pruned_rnnt.loss import checks
from pruned_rnnt.loss.bounds import check_bounds_type
from pruned_rnnt.loss.results import Bounds, Occupancy, TdtOccupancy
from pruned_rnnt.ops.common.library import MODIFIED, accumulator
from pruned_rnnt.ops.common.utterances import lengths_on


def checked_rows(rows: object, kind: Any) -> Any:
    """rows as that class of named tuples; TypeError unless they are a tuple of as many elements."""
    if not isinstance(rows, tuple) or len(rows) != len(kind._fields):
        raise TypeError(f"rows is a {type(rows).__name__}; it must be a {kind.__name__}")
    return kind(*rows)


def checked_arcs(prefix: str, **given: Tensor) -> list[Tensor]:
    """Tensors (N, T, U+1) by name, without gradient, in one accumulator's dtype; names in messages
    begin with prefix."""
    first_name, first = next(iter(given.items()))
    for name, x in given.items():
        checks.check_floating(f"{prefix}{name}", x, "(N, T, U+1)", 3)
        checks.check_same(f"{prefix}{name}", x, f"{prefix}{first_name}", first)
        meaning = f"the shape of {prefix}{first_name}"
        checks.check_shape(f"{prefix}{name}", x, tuple(first.shape), meaning)
    return in_one_precision(*given.values())


def in_one_precision(*tensors: Tensor) -> list[Tensor]:
    dtype = reduce(torch.promote_types, [accumulator(x.dtype) for x in tensors])
    return [x.detach().to(dtype) for x in tensors]


def check_durations_of_nodes(
    name: str, arcs: Tensor, nodes: Tensor, count: int | None = None
) -> None:
    """Numbers by duration, (N, T, U+1, K), of nodes (N, T, U+1); count: K."""
    checks.check_floating(name, arcs, "(N, T, U+1, K)", 4)
    checks.check_same(name, arcs, "the other rows", nodes)
    shape = (*nodes.shape, arcs.shape[3] if count is None else count)
    checks.check_shape(name, arcs, shape, "(N, T, U+1, K) with one column for each of durations")


def checked_occupancy(occupancy: Occupancy | TdtOccupancy) -> Occupancy | TdtOccupancy:
    """The occupancy with all its tensors checked and in one precision."""
    if isinstance(occupancy, TdtOccupancy):
        emit, blank, stay, durations = occupancy
        arcs = checked_arcs("occupancy.", emit=emit, blank=blank, stay=stay)
        check_durations_of_nodes("occupancy.durations", durations, arcs[0])
        return TdtOccupancy(arcs[0], arcs[1], arcs[2], durations)
    if not isinstance(occupancy, tuple) or len(occupancy) != 2:
        raise TypeError(
            f"occupancy is a {type(occupancy).__name__}; it must be the occupancy that a simple "
            "loss returns"
        )
    return Occupancy(*checked_arcs("occupancy.", emit=occupancy[0], blank=occupancy[1]))


def checked_lengths(
    rows: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    *,
    symbols: int,
    least: int = 1,
    validate: bool = False,
) -> tuple[Tensor, Tensor]:
    """Lengths (N,) of rows (N, T, ...), int32 on their device: of logits in least..T, of targets in
    0..symbols. validate: also read them on other devices than the CPU."""
    given = (
        ("logit_lengths", logit_lengths, least, rows.shape[1]),
        ("target_lengths", target_lengths, 0, symbols),
    )
    for name, x, low, high in given:
        checks.check_integers(name, x)
        checks.check_shape(name, x, (len(rows),), "(N,)")
        if not x.is_cpu:
            checks.check_same(name, x, "the rows", rows)
        if checks.readable(validate, x):
            n = checks.first_bad((x < low) | (x > high))
            if n is not None:
                raise ValueError(f"{name}[{n}] is {int(x[n])}; it must be in {low}..{high}")
    return lengths_on(rows.device, (logit_lengths, target_lengths))


def checked_bounds(bounds: Bounds, rows: Tensor) -> Bounds:
    """bounds of rows (N, T, ...), start on their device."""
    check_bounds_type(bounds)
    checks.check_integers("bounds.start", bounds.start)
    checks.check_shape("bounds.start", bounds.start, tuple(rows.shape[:2]), "(N, T)")
    checks.check_same("bounds.start", bounds.start, "the rows", rows)
    checks.check_s_range(bounds.s_range, MODIFIED)
    return bounds
