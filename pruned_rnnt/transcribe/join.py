"""Join the symbols of overlapping windows at words that both contain.

Where windows overlap, the words near the end of the first lack the audio after them, and those near
the beginning of the second the audio before them. The join is a word that both recognised at about
the same time, as far as possible from both edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Models place the same word at times that differ by this much from window to window.
_TOLERANCE_SECONDS = 0.6
# Longer runs of agreeing words than this are not preferred.
_MOST_AGREEING = 3


class TimedUnit(NamedTuple):
    """A word, or a symbol of a model without words.

    symbols: its ids. stop: position after its last symbol in the path. start, end: in seconds.
    """

    symbols: tuple[int, ...]
    stop: int
    start: float
    end: float

    @property
    def middle(self) -> float:
        return (self.start + self.end) / 2


class Join(NamedTuple):
    """keep: symbols that are kept of the first path; skip: symbols left out of the second one."""

    keep: int
    skip: int


def join(first: Sequence[TimedUnit], second: Sequence[TimedUnit], begin: float, end: float) -> Join:
    """The join of two paths that overlap from `begin` to `end`, in seconds.

    Of the words that agree, the join is in the longest run (up to three words count), and there at
    the one whose two times are closest to each other and to the middle of the overlap. If none
    agree, the first path is used up to the middle and the second one from there on.
    """
    middle = (begin + end) / 2
    places = [
        (min(_agreeing(first, second, i, j), _MOST_AGREEING), -_distance(one, other, middle), i, j)
        for i, one in enumerate(first)
        for j, other in enumerate(second)
        if one.end > begin and other.start < end and _agree(one, other)
    ]
    if places:
        *_, i, j = max(places)
        return Join(first[i].stop, second[j].stop)
    keep = max((unit.stop for unit in first if unit.middle < middle), default=0)
    skip = max((unit.stop for unit in second if unit.middle < middle), default=0)
    return Join(keep, skip)


def _agree(one: TimedUnit, other: TimedUnit) -> bool:
    return one.symbols == other.symbols and abs(one.middle - other.middle) < _TOLERANCE_SECONDS


def _distance(one: TimedUnit, other: TimedUnit, middle: float) -> float:
    """Seconds between the two words, and from the first to the middle of the overlap."""
    return abs(one.middle - other.middle) + abs(one.middle - middle)


def _agreeing(first: Sequence[TimedUnit], second: Sequence[TimedUnit], i: int, j: int) -> int:
    """The number of words in a row that agree, around words i and j."""
    before = after = 0
    while i > before and j > before and _agree(first[i - before - 1], second[j - before - 1]):
        before += 1
    while (
        i + after + 1 < len(first)
        and j + after + 1 < len(second)
        and _agree(first[i + after + 1], second[j + after + 1])
    ):
        after += 1
    return before + 1 + after
