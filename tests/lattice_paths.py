"""The oracle of the tests: every path through a small lattice, listed in plain Python."""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Arc(NamedTuple):
    frame: int
    column: int
    is_symbol: bool


class Rows(NamedTuple):
    """Occupancies or log-probabilities, each (N, T, U + 1) or (T, U + 1)."""

    emit: Tensor
    blank: Tensor


def paths(frames: int, symbols: int, rnnt_type: str) -> Iterator[list[Arc]]:
    """All paths of a lattice with the given numbers of frames and symbols."""

    def extend(frame: int, column: int) -> Iterator[list[Arc]]:
        if frame == frames:
            if column == symbols:
                yield []
            return
        for rest in extend(frame + 1, column):
            yield [Arc(frame, column, False), *rest]
        if column < symbols and not (rnnt_type == "rna" and frame == frames - 1):
            step = 0 if rnnt_type == "regular" else 1
            for rest in extend(frame + step, column + 1):
                yield [Arc(frame, column, True), *rest]

    yield from extend(0, 0)


class PathTable(NamedTuple):
    """Paths with their arcs side by side: P paths, A arcs of the longest one.

    frame_PA, column_PA: int64, where an arc begins. is_symbol_PA: bool. is_arc_PA: bool, False
    behind the last arc of a path. duration_PA: int64, an index, 0 for paths without durations.
    """

    frame_PA: Tensor
    column_PA: Tensor
    is_symbol_PA: Tensor
    is_arc_PA: Tensor
    duration_PA: Tensor

    def to(self, device: torch.device) -> "PathTable":
        return PathTable(*(x.to(device) for x in self))


def path_table(found: Iterable[Sequence[Any]]) -> PathTable:
    """The table of paths whose arcs have frame, column, is_symbol, and maybe a duration."""
    rows = [[(a[0], a[1], a[2], 1, a[3] if len(a) > 3 else 0) for a in path] for path in found]
    longest = max(map(len, rows), default=0)
    padded = [[*row, *[(0, 0, 0, 0, 0)] * (longest - len(row))] for row in rows]
    values = torch.tensor(padded, dtype=torch.int64).view(len(rows), longest, 5).unbind(2)
    return PathTable(values[0], values[1], values[2].bool(), values[3].bool(), values[4])


@functools.cache
def _table(frames: int, symbols: int, rnnt_type: str) -> PathTable:
    return path_table(paths(frames, symbols, rnnt_type))


def weight(path: list[Arc], emit: Tensor, blank: Tensor, rnnt_type: str) -> float:
    """Log-probability of a path. emit, blank: (T, U + 1) of one utterance."""
    total = 0.0
    for arc in path:
        if not arc.is_symbol:
            total += float(blank[arc.frame, arc.column])
            continue
        total += float(emit[arc.frame, arc.column])
        if rnnt_type == "constrained":
            total += float(blank[arc.frame, arc.column + 1])
    return total


def log_total(
    emit: Tensor, blank: Tensor, frames: int, symbols: int, rnnt_type: str = "regular"
) -> Tensor:
    """Log of the sum over all paths, differentiable. emit, blank: (T, U + 1) of one utterance."""
    table = _table(frames, symbols, rnnt_type).to(emit.device)
    t, u = table.frame_PA, table.column_PA
    score_PA = torch.where(table.is_symbol_PA, emit[t, u], blank[t, u])
    if rnnt_type == "constrained":
        after_PA = blank[t, (u + 1).clamp(max=symbols)]
        score_PA = score_PA + after_PA.where(table.is_symbol_PA, 0.0)
    return score_PA.where(table.is_arc_PA, 0.0).sum(1).logsumexp(0)


def joiner_log_probs(
    logits: Tensor, targets: list[int], blank: int, *, hat: bool = False
) -> tuple[Tensor, Tensor]:
    """emit, blank (T, U + 1) of one utterance's logits (T, U + 1, V); the last column of emit is
    -inf."""
    log_probs = logits.log_softmax(-1)
    if hat:
        others = [v for v in range(logits.shape[-1]) if v != blank]
        keep = torch.nn.functional.logsigmoid(-logits[..., blank, None])
        log_probs = torch.zeros_like(logits)
        log_probs[..., others] = keep + logits[..., others].log_softmax(-1)
        log_probs[..., blank] = torch.nn.functional.logsigmoid(logits[..., blank])
    columns = [log_probs[:, u, y] for u, y in enumerate(targets)]
    columns.append(torch.full_like(log_probs[:, 0, 0], -math.inf))
    return torch.stack(columns, dim=1), log_probs[:, : len(targets) + 1, blank]


def posteriors(
    emit: Tensor, blank: Tensor, lengths: list[tuple[int, int]], rnnt_type: str = "regular"
) -> Rows:
    """Occupancy of each arc, summed over paths. emit, blank: (N, T, U + 1)."""
    result = Rows(torch.zeros_like(emit), torch.zeros_like(blank))
    for n, (frames, symbols) in enumerate(lengths):
        scored = [
            (path, weight(path, emit[n], blank[n], rnnt_type))
            for path in paths(frames, symbols, rnnt_type)
        ]
        top = max(score for _, score in scored)
        total = sum(math.exp(score - top) for _, score in scored)
        for path, score in scored:
            probability = math.exp(score - top) / total
            for arc in path:
                target = result.emit if arc.is_symbol else result.blank
                target[n, arc.frame, arc.column] += probability
    return result


def random_rows(batch: int, frames: int, symbols: int, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, frames, symbols + 1)
    return Rows(
        -3 * torch.rand(shape, generator=generator, dtype=torch.float64),
        -3 * torch.rand(shape, generator=generator, dtype=torch.float64),
    )
