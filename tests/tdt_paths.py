"""The oracle of the TDT losses: the sum over every path of a small lattice, differentiable."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from tests.lattice_paths import PathTable, joiner_log_probs, path_table


class TdtArc(NamedTuple):
    """From (frame, column); duration is an index into the durations."""

    frame: int
    column: int
    is_symbol: bool
    duration: int


def tdt_paths(frames: int, symbols: int, durations: Sequence[int]) -> Iterator[list[TdtArc]]:
    """All paths: symbols land before the end, a last blank lands on the end exactly."""

    def extend(frame: int, column: int) -> Iterator[list[TdtArc]]:
        for n, duration in enumerate(durations):
            target = frame + duration
            blank = TdtArc(frame, column, False, n)
            if duration > 0 and target == frames and column == symbols:
                yield [blank]
            if duration > 0 and target < frames:
                for rest in extend(target, column):
                    yield [blank, *rest]
            if target < frames and column < symbols:
                for rest in extend(target, column + 1):
                    yield [TdtArc(frame, column, True, n), *rest]

    yield from extend(0, 0)


class TdtScores(NamedTuple):
    """Of one utterance: emit, blank (T,U_n+1) and log-probabilities of durations (T,U_n+1,K)."""

    emit: Tensor
    blank: Tensor
    durations: Tensor


def tdt_scores(
    logits: Tensor, duration_logits: Tensor, targets: list[int], blank: int, sigma: float = 0.0
) -> TdtScores:
    """From the logits (T,U_n+1,V) and duration_logits (T,U_n+1,K) of one utterance."""
    emit, stay = joiner_log_probs(logits, targets, blank)
    return TdtScores(emit - sigma, stay - sigma, duration_logits.log_softmax(-1))


@functools.cache
def tdt_table(frames: int, symbols: int, durations: tuple[int, ...]) -> PathTable:
    return path_table(tdt_paths(frames, symbols, durations))


def path_scores(scores: TdtScores, table: PathTable) -> Tensor:
    """(P,): the log-probability of each path."""
    t, u = table.frame_PA, table.column_PA
    arcs_PA = scores.blank[t, u].where(~table.is_symbol_PA, scores.emit[t, u])
    arcs_PA = arcs_PA + scores.durations[t, u, table.duration_PA]
    return arcs_PA.where(table.is_arc_PA, 0.0).sum(1)


def tdt_total(
    scores: TdtScores,
    frames: int,
    symbols: int,
    durations: Sequence[int],
    start: Tensor | None = None,
    s_range: int = 0,
) -> Tensor:
    """log P, the sum over all paths (those inside the band with start (T))."""
    table = tdt_table(frames, symbols, tuple(durations)).to(scores.emit.device)
    score_P = path_scores(scores, table)
    if start is not None:
        place_PA = table.column_PA - start.to(scores.emit.device).long()[table.frame_PA]
        is_inside_PA = (place_PA >= 0) & (place_PA < s_range)
        score_P = score_P[(is_inside_PA | ~table.is_arc_PA).all(1)]
    return score_P.logsumexp(0)
