"""The oracle of the TDT losses: every path through a small lattice, one by one, differentiable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.lattice_paths import joiner_log_probs


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


def inside_band(path: list[TdtArc], start: Tensor, s_range: int) -> bool:
    """Whether all nodes of a path are inside the band with start (T)."""
    return all(0 <= arc.column - int(start[arc.frame]) < s_range for arc in path)


def tdt_total(
    scores: TdtScores,
    frames: int,
    symbols: int,
    durations: Sequence[int],
    start: Tensor | None = None,
    s_range: int = 0,
) -> Tensor:
    """log P, the sum over all paths (those inside the band)."""
    weights = []
    for path in tdt_paths(frames, symbols, durations):
        if start is not None and not inside_band(path, start, s_range):
            continue
        weight = scores.emit.new_zeros(())
        for t, u, is_symbol, n in path:
            weight = weight + (scores.emit if is_symbol else scores.blank)[t, u]
            weight = weight + scores.durations[t, u, n]
        weights.append(weight)
    return torch.stack(weights).logsumexp(0)
