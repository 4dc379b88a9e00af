"""Back pointers of beam search with durations, from which hypotheses are read.

Axes: N batch, B beam, K paths, G steps of the search.

A step extends the beam of one frame once; a frame has a fixed number of steps. A row's origin is
the row of an earlier step that it was extended from, as step * B + row, or -1 - row for a row at
the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.decode.search.hypothesis import Hypothesis
from pruned_rnnt.decode.search.pending import Pending
from pruned_rnnt.decode.search.stream_search import Continuation


class TraceStep(NamedTuple):
    """The arcs to the rows (N, B) of a step: origin, symbol (-1: blank), duration, and increase of
    the score by the symbol. The arc of a row at the start is part of what was before."""

    origin: Tensor
    symbol: Tensor
    duration: Tensor
    added: Tensor


class LastArcs(NamedTuple):
    """The last arcs of paths (N, K): the rows of these, their scores (-inf: no path), the arcs."""

    row: Tensor
    score: Tensor
    arc: TraceStep


def trace_paths(
    last: LastArcs, steps: Sequence[TraceStep], steps_per_frame: int
) -> Pending[list[list[Continuation]]]:
    """The paths with these last arcs, in their order, without waiting for the device."""
    width = steps[0].origin.size(1) if steps else 1
    table = [torch.stack(x, dim=1).flatten(1) for x in zip(*steps, strict=True)]

    def paths(tensors: Sequence[Tensor]) -> list[list[Continuation]]:
        columns = (tensor.tolist() for tensor in tensors)
        rows, scores = islice(columns, 2)
        arcs = list(zip(*islice(columns, len(TraceStep._fields)), strict=True))
        tables = list(zip(*columns, strict=True)) or [()] * len(rows)
        return [
            [
                _follow(row, score, arc, tables[n], width * steps_per_frame)
                for row, score, *arc in zip(rows[n], scores[n], *arcs[n], strict=True)
                if score > -torch.inf
            ]
            for n in range(len(rows))
        ]

    return Pending(list(chain(last[:2], last.arc, table)), paths)


def _follow(
    row: int, score: float, arc: Sequence[Any], table: Sequence[list[Any]], per_frame: int
) -> Continuation:
    origin, *symbol_of_arc = arc
    path: list[tuple[int, int, int, float]] = []
    while origin >= 0:
        symbol, duration, added = symbol_of_arc
        if symbol >= 0:
            path.append((symbol, origin // per_frame, duration, added))
        origin, *symbol_of_arc = (column[origin] for column in table)
    columns = zip(*reversed(path), strict=True) if path else [()] * 4
    path_symbols, path_frames, path_durations, path_scores = columns
    part = Hypothesis(
        symbols=path_symbols,
        frames=path_frames,
        score=score,
        symbol_scores=path_scores,
        durations=path_durations,
    )
    return Continuation(row, -1 - origin, part)
