"""The oracle of the tests: every path through a small lattice, one by one, in plain Python."""

import math
from collections.abc import Iterator
from typing import NamedTuple

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
    scores = []
    for path in paths(frames, symbols, rnnt_type):
        score = torch.zeros((), dtype=emit.dtype)
        for t, u, is_symbol in path:
            score = score + (emit[t, u] if is_symbol else blank[t, u])
            if is_symbol and rnnt_type == "constrained":
                score = score + blank[t, u + 1]
        scores.append(score)
    return torch.stack(scores).logsumexp(0)


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
