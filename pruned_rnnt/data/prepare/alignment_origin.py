"""What the times of alignments in a lhotse manifest are relative to.

    recording   |------[ cut   |== utterance ==|  ]------|
    origins     0      1

lhotse defines 0, and cutting leaves the times so. Other programs, `align` among them, write times
relative to the cut, or beside recordings, to the supervision. A manifest has one origin for each
kind of alignment: that with which more of its first utterances have all their items inside. With
as many for both, times that fit an utterance both ways are dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any, Literal, NamedTuple

from lhotse.supervision import AlignmentItem
from lhotse.utils import fastcopy

from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry

# Items may lie so many seconds outside of their utterance.
MOST_OUTSIDE = 0.05
_MOST_VOTERS = 1000
Origin = Literal["recording", "part"]
_ORIGINS: tuple[Origin, ...] = ("recording", "part")


class CutEntry(NamedTuple):
    """The entry of an utterance, whose cut has the alignments of the manifest.

    part_start: where the part of the recording starts that the manifest describes: the cut, or
        beside recordings, the supervision.
    """

    entry: CorpusEntry
    part_start: float = 0.0

    @property
    def alignments(self) -> Mapping[str, Sequence[AlignmentItem]]:
        supervisions = self.entry.cut.supervisions if self.entry.cut is not None else ()
        return (supervisions[0].alignment or {}) if supervisions else {}

    def shift(self, origin: Origin) -> float:
        """What makes times relative to the utterance, in seconds."""
        start: float = self.entry.cut.start
        return (0.0 if origin == "recording" else self.part_start) - start


def with_times_in_utterances(entries: Iterable[CutEntry]) -> Iterator[CorpusEntry]:
    """The entries, with the times of all alignments relative to their utterances.

    Items are clamped to the utterance. Entries that lose an alignment have a note.
    """
    waiting = iter(entries)
    first = list(islice(waiting, _MOST_VOTERS))
    origins = _origins(first)
    for each in chain(first, waiting):
        yield _with_times(each, origins) if each.alignments else each.entry


def _origins(entries: Sequence[CutEntry]) -> dict[str, list[Origin]]:
    """By kind of alignment, the origins that fit the most utterances."""
    votes: dict[str, Counter[Origin]] = {}
    for each in entries:
        duration = each.entry.cut.duration if each.alignments else 0.0
        for kind, items in each.alignments.items():
            for origin in _ORIGINS:
                fits = _moved(items, each.shift(origin), duration) is not None
                votes.setdefault(kind, Counter())[origin] += fits
    return {
        kind: [origin for origin in _ORIGINS if found[origin] == max(found.values())]
        for kind, found in votes.items()
    }


def _with_times(given: CutEntry, origins: Mapping[str, Sequence[Origin]]) -> CorpusEntry:
    entry = given.entry
    supervision, duration = entry.cut.supervisions[0], entry.cut.duration
    kept, note = {}, ""
    # Then nothing can be wrong but single items.
    is_clear = not _differ(list(map(given.shift, _ORIGINS)))
    for kind, items in given.alignments.items():
        shifts = list(map(given.shift, origins.get(kind, _ORIGINS)))
        fitting = {
            shift: moved
            for shift in (shifts[:1] if is_clear else shifts)
            if (moved := _moved(items, shift, duration, without_outer=is_clear)) is not None
        }
        if items and not fitting:
            note = note or f"lost their {kind} times, which lie outside the utterance"
        elif items and _differ(list(fitting)):
            note = note or (
                f"lost their {kind} times, which fit into the utterance both as times in the "
                "recording and as times in its part"
            )
        else:
            kept[kind] = next(iter(fitting.values()), [])
    changed = fastcopy(supervision, alignment=kept or None)
    return replace(entry, cut=fastcopy(entry.cut, supervisions=[changed]), note=note)


def _differ(shifts: Sequence[float]) -> bool:
    return max(shifts) - min(shifts) > MOST_OUTSIDE


def _moved(
    items: Sequence[AlignmentItem], seconds: float, duration: float, *, without_outer: bool = False
) -> list[AlignmentItem] | None:
    """The items so many seconds later, clamped to 0 and the duration.

    None if one lies outside, or with `without_outer`, if all do; else those are left out.
    """
    moved = []
    for item in items:
        try:
            start = item.start + seconds
            end = start + (item.duration or 0.0)
        except TypeError:  # not numbers
            return None
        if without_outer:
            if start > duration or end < 0 or end < start:
                continue
        elif not -MOST_OUTSIDE <= start <= end <= duration + MOST_OUTSIDE:
            return None
        start, end = min(max(start, 0.0), duration), min(max(end, 0.0), duration)
        moved.append(item._replace(start=round(start, 8), duration=round(end - start, 8)))
    return moved if moved or not items else None


def trimmed(supervision: Any, duration: float) -> Any:
    """The part of a supervision within 0 and the duration. Alignments, whose times may have another
    origin, stay as they are."""
    inside = fastcopy(supervision, alignment=None).trim(duration)
    return fastcopy(inside, alignment=supervision.alignment)
