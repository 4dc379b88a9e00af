"""Back pointers of beam search with durations, from which hypotheses are read at the end.

Axes: N batch, B beam, K best, G steps of the search.

A step extends the beam of one frame once; a frame has a fixed number of steps. A row's origin is
the row of an earlier step that it was extended from, as step * B + row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.decode.search.hypothesis import Hypothesis


class TraceStep(NamedTuple):
    """The arcs to the rows (N, B) of a step: origin (-1: the start), symbol (-1: blank), duration,
    and increase of the score by the symbol."""

    origin: Tensor
    symbol: Tensor
    duration: Tensor
    added: Tensor


def trace_tdt_hypotheses(
    origins_NK: Tensor, scores_NK: Tensor, steps: Sequence[TraceStep], steps_per_frame: int
) -> list[list[Hypothesis]]:
    """The hypotheses whose last arcs, blanks, start at the rows `origins_NK` (-1: the start)."""
    if steps:
        table = [torch.stack(x, dim=1).flatten(1).tolist() for x in zip(*steps, strict=True)]
    else:
        table = [[[]] * len(scores_NK)] * 4
    width = steps[0].origin.size(1) if steps else 1
    results: list[list[Hypothesis]] = []
    for origins, scores, *rows in zip(origins_NK.tolist(), scores_NK.tolist(), *table, strict=True):
        results.append(
            [
                _follow(origin, score, rows, width * steps_per_frame)
                for origin, score in zip(origins, scores, strict=True)
                if score > -torch.inf
            ]
        )
    return results


def _follow(row: int, score: float, table: Sequence[list[Any]], per_frame: int) -> Hypothesis:
    origins, symbols, durations, added = table
    path: list[tuple[int, int, int, float]] = []
    while row >= 0:
        origin = origins[row]
        if symbols[row] >= 0:
            path.append((symbols[row], origin // per_frame, durations[row], added[row]))
        row = origin
    columns = zip(*reversed(path), strict=True) if path else [()] * 4
    path_symbols, path_frames, path_durations, path_scores = columns
    return Hypothesis(
        symbols=path_symbols,
        frames=path_frames,
        score=score,
        symbol_scores=path_scores,
        durations=path_durations,
    )
