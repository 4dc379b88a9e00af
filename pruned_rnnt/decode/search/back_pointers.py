"""Back pointers of beam searches, from which the symbols of hypotheses are read at the end.

Axes: N batch, B beam, K best or paths, T frames, G steps of a search with durations.

With durations, a step extends the beam of one frame once; a frame has a fixed number of steps. A
row's origin is the row of an earlier step that it was extended from, as step * B + row, or -1 - row
for a row at the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.decode.search.interface import Continuation, Hypothesis, Pending
from pruned_rnnt.ops.search.search_frames import BeamSteps


def stack_steps(frames: Sequence[BeamSteps], like_NB: Tensor) -> BeamSteps:
    """Stack the steps (N, B) of each frame along a new axis 1; like_NB: int64, for no frames."""
    if not frames:
        empty = like_NB[:, None, :][:, :0]
        return BeamSteps(empty, empty, empty.float())
    return BeamSteps(*(torch.stack(field, dim=1) for field in zip(*frames, strict=True)))


def pending_trace(
    kept_NK: Tensor, score_NK: Tensor, steps: BeamSteps
) -> Pending[list[list[Hypothesis]]]:
    """Follow the best rows of the last beam back to the first frame."""
    row_NTK = _rows_of_kept(kept_NK, steps)
    found = Pending(_on_path(row_NTK, score_NK, steps), _hypotheses)
    return found.map(lambda found: [[path for path in own if path is not None] for own in found])


def pending_continuations(
    kept_NK: Tensor, score_NK: Tensor, steps: BeamSteps
) -> Pending[list[list[Continuation]]]:
    """The paths through a chunk of streams that end in the kept rows, in their order."""
    row_NTK = _rows_of_kept(kept_NK, steps)
    origin_NK = steps.parent[:, 0].gather(1, row_NTK[:, 0])

    def continuations(tensors: Sequence[Tensor]) -> list[list[Continuation]]:
        kept, origins, *on_path = tensors
        return [
            [
                Continuation(row, origin, part)
                for row, origin, part in zip(*own, strict=True)
                if part is not None
            ]
            for own in zip(kept.tolist(), origins.tolist(), _hypotheses(on_path), strict=True)
        ]

    return Pending([kept_NK, origin_NK, *_on_path(row_NTK, score_NK, steps)], continuations)


def _rows_of_kept(kept_NK: Tensor, steps: BeamSteps) -> Tensor:
    """(N, T, K): the row in each frame that each kept row of the last frame comes from."""
    row_NTB = _rows_of_last(steps.parent)
    return row_NTB.gather(2, kept_NK[:, None].expand(-1, row_NTB.size(1), -1))


def _on_path(row_NTK: Tensor, score_NK: Tensor, steps: BeamSteps) -> list[Tensor]:
    """The scores (N, K), and the symbols and the scores that they added (N, K, T)."""
    symbols_NKT = steps.symbol.gather(2, row_NTK).transpose(1, 2)
    added_NKT = steps.added.gather(2, row_NTK).transpose(1, 2)
    return [score_NK, symbols_NKT, added_NKT]


def _rows_of_last(parent_NTB: Tensor) -> Tensor:
    """(N, T, B): the row in each frame that each row of the last frame comes from.

    In as many steps as the number of frames has bits: after each one the rows are those of twice as
    many frames later.
    """
    frames = parent_NTB.size(1)
    own_B = torch.arange(parent_NTB.size(2), device=parent_NTB.device)
    own_NTB = own_B.expand_as(parent_NTB)
    # The origin of a row of the next frame; the last frame has none.
    row_NTB = torch.cat((parent_NTB[:, 1:], own_NTB[:, :1]), dim=1)
    later = 1
    while later < frames:
        further_NTB = row_NTB[:, :-later].gather(2, row_NTB[:, later:])
        row_NTB = torch.cat((further_NTB, row_NTB[:, -later:]), dim=1)
        later *= 2
    return row_NTB


def _hypotheses(tensors: Sequence[Tensor]) -> list[list[Hypothesis | None]]:
    """The hypotheses of `_on_path`; None for a row of probability 0."""
    score_NK, symbols_NKT, added_NKT = tensors
    scores, symbols, added = score_NK.tolist(), symbols_NKT.numpy(), added_NKT.numpy()
    results: list[list[Hypothesis | None]] = []
    for n, scores_K in enumerate(scores):
        results.append([])
        for k, score in enumerate(scores_K):
            if score == -torch.inf:
                results[n].append(None)
                continue
            (frames,) = (symbols[n, k] >= 0).nonzero()
            results[n].append(
                Hypothesis(
                    symbols=tuple(symbols[n, k, frames].tolist()),
                    frames=tuple(frames.tolist()),
                    score=score,
                    symbol_scores=tuple(added[n, k, frames].tolist()),
                )
            )
    return results


class TraceStep(NamedTuple):
    """The arcs to rows, (N, K) or those of the beams of all steps (N, G, B): origin, symbol
    (-1: blank), duration, and log-probability of the symbol. The arc of a row at the start is part
    of what was before."""

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
    last: LastArcs, steps: TraceStep | None, steps_per_frame: int
) -> Pending[list[list[Continuation]]]:
    """The paths with these last arcs, in their order, without waiting for the device; steps: None
    without frames."""
    width = steps.origin.size(2) if steps is not None else 1
    table = [x.flatten(1) for x in steps or ()]

    def paths(tensors: Sequence[Tensor]) -> list[list[Continuation]]:
        columns = (tensor.tolist() for tensor in tensors)
        rows, scores = islice(columns, 2)
        arcs = list(zip(*islice(columns, len(TraceStep._fields)), strict=True))
        tables = list(zip(*columns, strict=True)) or [()] * len(rows)
        return [
            [
                _follow(row, score, arc, tables[n], width * steps_per_frame)
                for row, score, *arc in zip(rows[n], scores[n], *arcs[n], strict=True)
                if score != -torch.inf
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
