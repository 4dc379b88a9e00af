"""Speech that is far quieter than the rest of its segment.

Models lose such words, and neither their CTC head nor gaps between symbols always show it. The
segment is decoded a second time with these stretches as loud as the rest. Where this gives other
symbols, they replace those of which the model was unsure, if it is sure of them; else the stretch
is marked.

Such a stretch is found by its contrast to the energy around it, because steady noise is as quiet.

Axes: N batch, T feature frames (10 ms), F mel bins. Energies are natural logarithms.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.decode.head_paths import HeadPath, Spikes
from pruned_rnnt.decode.search.interface import Hypothesis
from pruned_rnnt.transcribe.head_evidence import different
from pruned_rnnt.transcribe.lost_speech import FoundPath, Stretch
from pruned_rnnt.transcribe.speech_energy import in_long_rows, local_speech

# Speech is quiet 20 dB below the loudest speech of the segment. In 300 commands of even level, no
# stretch was.
_DEPTH = 4.5
# Symbols may be placed so far from the quiet frames.
_REACH = 30
# The least log-probability of the symbols of a row: below `_UNSURE` they are doubted, and above
# `_SURE` they may take the place of doubted ones.
_UNSURE, _SURE = -3.0, -1.5
# Marks need so many symbols in a row: louder noise may invent single ones.
_LEAST_DIFFERENT = 2


def missing_gain(features_NTF: Tensor, lengths_N: Tensor) -> Tensor:
    """(N, T) on the device: how far quiet speech is below the rest of its segment; elsewhere 0."""
    real_NT = torch.arange(features_NTF.size(1), device=features_NTF.device) < lengths_N[:, None]
    local = local_speech(features_NTF, real_NT)
    loudest_N1 = local.energy_NT.masked_fill(~local.is_speech_NT, -torch.inf).amax(
        dim=1, keepdim=True
    )
    is_quiet_NT = in_long_rows(local.is_speech_NT & (local.energy_NT < loudest_N1 - _DEPTH))
    return torch.where(is_quiet_NT, loudest_N1 - local.energy_NT, 0.0)


class Compared(NamedTuple):
    """A path with the symbols that it lacked, and where symbols are still lost or doubted."""

    path: FoundPath
    lost: list[Stretch]
    doubtful: list[Stretch]


def compared(path: FoundPath, louder: FoundPath, quiet: Sequence[Stretch]) -> Compared:
    """Compare a path with that through the same segment with its quiet stretches made louder."""
    parts: list[tuple[FoundPath, range]] = []
    lost: list[Stretch] = []
    doubtful: list[Stretch] = []
    reached = 0
    for new, own in different(louder.symbols_in_time, path.symbols_in_time):
        places = [louder.symbol_places[n] for n in new] + [path.symbol_places[n] for n in own]
        stretch = Stretch(min(places), max(places) + path.step)
        if not any(
            stretch.begin < end + _REACH and begin - _REACH < stretch.end for begin, end in quiet
        ):
            continue
        if own and _least(path, own) >= _UNSURE:
            continue
        is_row = max(len(new), len(own)) >= _LEAST_DIFFERENT
        if new and _least(louder, new) > _SURE and _fits(path, own, louder, new):
            parts += [(path, range(reached, own.start)), (louder, new)]
            reached = own.stop
        elif is_row:
            (doubtful if own else lost).append(stretch)
    if parts:
        path = _spliced([*parts, (path, range(reached, len(path.hypothesis.symbols)))])
    return Compared(path, lost, doubtful)


def _least(path: FoundPath, places: range) -> float:
    """The least log-probability of symbols, in the CTC head if there is one."""
    scores = path.hypothesis.symbol_scores if path.head is None else path.head.log_probs
    return min(scores[n] for n in places)


def _fits(path: FoundPath, own: range, louder: FoundPath, new: range) -> bool:
    """Whether the new symbols are between those beside the own ones that they replace."""
    before = path.symbol_places[max(0, own.start - 1) : own.start]
    after = path.symbol_places[own.stop : own.stop + 1]
    places = [*before, *louder.symbol_places[new.start : new.stop], *after]
    return places == sorted(places)


def _spliced(parts: Sequence[tuple[FoundPath, range]]) -> FoundPath:
    """The path of these symbols of some paths through the same segment; spikes of the first."""
    first = parts[0][0]  # perhaps with an empty range
    taken = [(path, n) for path, places in parts for n in places]
    scores = tuple(path.hypothesis.symbol_scores[n] for path, n in taken)
    hypothesis = Hypothesis(
        symbols=tuple(path.hypothesis.symbols[n] for path, n in taken),
        frames=tuple(accumulate((path.hypothesis.frames[n] for path, n in taken), max)),
        score=first.hypothesis.score + sum(scores) - sum(first.hypothesis.symbol_scores),
        symbol_scores=scores,
        durations=tuple(
            path.hypothesis.durations[n] for path, n in taken if path.hypothesis.durations
        ),
    )
    heads = [path.head for path, _ in parts]
    if any(head is None for head in heads):
        return FoundPath(hypothesis, None, first.step)
    found = [(path.head, n) for path, n in taken if path.head is not None]
    head = HeadPath(
        tuple(accumulate((head.frames[n] for head, n in found), max)),
        tuple(head.log_probs[n] for head, n in found),
        Spikes((), ()) if first.head is None else first.head.spikes,
    )
    return FoundPath(hypothesis, head, first.step)
