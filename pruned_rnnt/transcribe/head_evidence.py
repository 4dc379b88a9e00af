"""Where the CTC head of the encoder has other symbols than the search.

Both read the same encoder output, but the search of a transducer goes on from its last symbols, and
in audio unlike its training utterances it skips speech of which the head still emits symbols. The
head needs no gap to show this: symbols may be lost between two others that are close together.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from pruned_rnnt.decode.head_paths import Spikes
from pruned_rnnt.decode.scoring.error_statistics import align_words
from pruned_rnnt.transcribe.lost_speech import LEAST_FRAMES, UNSURE, FoundPath, Stretch

# So many symbols in a row that only the head has are lost; heads invent single ones.
_LEAST_MISSING = 2
# A row of so many symbols is doubtful if the head gives one of them less than this probability,
# as a logarithm, where it fits best. In right texts of our models, none had less than -5.7.
_LEAST_DIFFERENT, _DOUBTFUL = 2, -6.0
# Less doubt is enough, about a row or a single symbol, if the next one is so many feature frames
# later: words may be lost between the two.
_WIDE_FRAMES, _DOUBTFUL_IF_WIDE, _SINGLE_IF_WIDE = 60, -2.0, -4.0


class Disagreement(NamedTuple):
    """A stretch between symbols that the head and the search have in common.

    is_lost: the head has more symbols there. is_empty: the search has none. is_doubtful: it has
    some, but the head contradicts them, or has more.
    """

    stretch: Stretch
    is_lost: bool
    is_empty: bool
    is_doubtful: bool


def disagreements(path: FoundPath, end: int | None = None) -> list[Disagreement]:
    """Where the head and the search differ by more than single symbols; none without a head.

    end: the feature frame where the speech ends, if known.
    """
    symbols = path.hypothesis.symbols
    if path.head is None or path.head.spikes.symbols == symbols:
        return []
    found = []
    for spikes, places in different(path.head.spikes, path.symbols_in_time):
        log_probs = [path.head.log_probs[n] for n in places]
        frames = [path.head.spikes.frames[n] for n in spikes]
        frames += [path.head.frames[n] for n in places]
        is_row = max(len(spikes), len(places)) >= _LEAST_DIFFERENT
        is_lost = len(spikes) - len(places) >= _LEAST_MISSING
        doubt = min(log_probs, default=0.0)
        each = Disagreement(
            Stretch(min(frames) * path.step, (max(frames) + 1) * path.step),
            is_lost=is_lost,
            is_empty=not places,
            is_doubtful=bool(places)
            and (
                is_lost
                or (is_row and doubt < _DOUBTFUL)
                or (
                    doubt < (_DOUBTFUL_IF_WIDE if is_row else _SINGLE_IF_WIDE)
                    and _widest(path, places, end) >= _WIDE_FRAMES
                )
            ),
        )
        if each.is_lost or each.is_doubtful:
            found.append(each)
    return found


def may_be_invented(path: FoundPath, gap: Stretch, longer: FoundPath) -> bool:
    """Whether symbols that `longer` has in the gap, and `path` has not, need more evidence.

    Not those that the head has in the whole utterance. The head of a part without its context is
    sure of invented symbols, too, but seldom of many in a row.
    """
    more = len(longer.symbol_frames) - len(path.symbol_frames)
    if path.head is None or longer.head is None or not more:
        return more > 0
    first = path.symbols_before(gap.begin)
    own = range(first, first + more)
    known = {m.place for m in _matches(path.head.spikes, longer.symbols_in_time)}
    if known.issuperset(own):
        return False
    is_short = gap.end - gap.begin < LEAST_FRAMES
    return is_short or min(longer.head.log_probs[n] for n in own) < UNSURE


def head_frames(path: FoundPath) -> list[int]:
    """The frame of each symbol: that of the head, if it has the same one, else that of the path."""
    frames = list(path.symbol_frames)
    if path.head is not None:
        for match in _matches(path.head.spikes, path.symbols_in_time):
            frames[match.place] = path.head.spikes.frames[match.spike]
    return frames


def _widest(path: FoundPath, places: range, end: int | None) -> int:
    """The most feature frames between two of these symbols and those beside them."""
    near = path.symbol_places[max(0, places.start - 1) : places.stop + 1]
    if places.stop == len(path.symbol_places) and end is not None:
        near.append(end)
    return max((later - one for one, later in pairwise(near)), default=0)


class _Match(NamedTuple):
    """Positions of a symbol that the head and the path have in common."""

    spike: int
    place: int


def _matches(head: Spikes, path: Spikes) -> list[_Match]:
    """Of the alignments with the fewest differences, one whose symbols are close in time.

    Of a sentence that was said twice and found once, either copy may be the one that is missing.
    """
    spikes: list[int] = []
    places: list[int] = []
    spike = place = 0
    for first, second in align_words(list(map(str, head.symbols)), list(map(str, path.symbols))):
        if first == second:
            spikes.append(spike)
            places.append(place)
        spike += first is not None
        place += second is not None
    _move_gaps(spikes, head, places, path)
    _move_gaps(places, path, spikes, head)
    return list(map(_Match, spikes, places))


def _move_gaps(own: list[int], one: Spikes, others: list[int], other: Spikes) -> None:
    """Move each gap between matches to where the symbols beside it are closest in time.

        one     a b c a b c x            one     a b c a b c x
        other   a b c       x    ->      other         a b c x

    Args:
        own, others: positions of the matches in `one`, which are changed, and in `other`.
    """
    for after in range(len(own) + 1):
        left, other_left = (own[after - 1], others[after - 1]) if after else (-1, -1)
        is_last = after == len(own)
        right, other_right = (
            (len(one.symbols), len(other.symbols)) if is_last else (own[after], others[after])
        )
        gap = right - left - 1
        if gap and other_right - other_left == 1:
            _shift(own, gap, range(after - 1, -1, -1), one, others, other)
            _shift(own, -gap, range(after, len(own)), one, others, other)


def _shift(
    own: list[int], by: int, matches: range, one: Spikes, others: list[int], other: Spikes
) -> None:
    """Shift as many of these matches, the nearest first, as brings them closer in time."""
    gain = most = best = 0
    for count, match in enumerate(matches, 1):
        old, new, frame = own[match], own[match] + by, other.frames[others[match]]
        if one.symbols[old] != one.symbols[new]:
            break
        gain += abs(one.frames[old] - frame) - abs(one.frames[new] - frame)
        if gain > most:
            most, best = gain, count
        following = match + matches.step
        if count < len(matches) and (
            own[following] - old != matches.step
            or others[following] - others[match] != matches.step
        ):
            break
    for match in matches[:best]:
        own[match] += by


def different(head: Spikes, path: Spikes) -> Iterator[tuple[range, range]]:
    """The positions in both, for each stretch between two symbols that they have in common."""
    spike = place = 0
    ends = _Match(len(head.symbols), len(path.symbols))
    for match in [*_matches(head, path), ends]:
        if match != (spike, place):
            yield range(spike, match.spike), range(place, match.place)
        spike, place = match.spike + 1, match.place + 1
