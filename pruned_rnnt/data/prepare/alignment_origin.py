"""What the times of alignments in a lhotse manifest are relative to.

    recording   |------[ cut   |== utterance ==|  ]------|
    origins     0      1       2

lhotse defines 0, and cutting leaves the times so. Other programs write times relative to the cut
(`align` among them) or to the supervision, which is the utterance. An origin fits an utterance if
all items then lie inside it. Where several fit that differ, the utterances that tell them apart
decide for those that do not; without such, the times are dropped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal, NamedTuple

from lhotse.supervision import AlignmentItem
from lhotse.utils import fastcopy

from pruned_rnnt.data.input.manifest_items import MOST_OUTSIDE
from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry

# Utterances with alignments that decide for the others, and entries that are held for them.
_MOST_VOTERS, _MOST_HELD = 1000, 20_000
# An origin counts if it fits this share of the utterances that tell origins apart.
_LEAST_VOTES = 0.9
# Fewer items inside are not those of the utterance.
_LEAST_INSIDE = 0.5
_OUTSIDE = "lie outside the utterance"
_UNCLEAR = "may be relative to the recording or to the cut: both fit"
Origin = Literal["recording", "cut", "supervision"]
_ORIGINS: tuple[Origin, ...] = ("recording", "cut", "supervision")
Items = Sequence[AlignmentItem]


class CutEntry(NamedTuple):
    """The entry of an utterance, whose cut has the alignments of the manifest.

    whole_start: where the cut of the manifest, of which this one is a part, starts in its
        recording.
    """

    entry: CorpusEntry
    whole_start: float = 0.0

    @property
    def alignments(self) -> Mapping[str, Items]:
        supervisions = self.entry.cut.supervisions if self.entry.cut is not None else ()
        return (supervisions[0].alignment or {}) if supervisions else {}

    def shifts(self) -> dict[Origin, float]:
        """What makes times with each origin relative to the utterance, in seconds."""
        start: float = self.entry.cut.start
        return {"recording": -start, "cut": self.whole_start - start, "supervision": 0.0}

    def fitting(self, items: Items) -> list[Origin]:
        """The origins with which all items lie in the utterance."""
        latest = self.entry.cut.duration + MOST_OUTSIDE
        return [
            origin
            for origin, shift in self.shifts().items()
            if all(-MOST_OUTSIDE <= x.start <= x.end <= latest for x in _spans(items, shift))
        ]


def with_times_in_utterances(entries: Iterable[CutEntry]) -> Iterator[CorpusEntry]:
    """The entries, with the times of all alignments relative to their utterances.

    Items are clamped to the utterance. Entries that lose times have a note.
    """
    waiting = iter(entries)
    held, voters = [], 0
    for each in waiting:
        held.append(each)
        voters += bool(each.alignments)
        if voters == _MOST_VOTERS or len(held) == _MOST_HELD:
            break
    origins = _usual_origins(held)
    for each in chain(held, waiting):
        yield _with_times(each, origins) if each.alignments else each.entry


def _usual_origins(entries: Sequence[CutEntry]) -> dict[str, list[Origin]]:
    """By kind of alignment, the origins of the utterances that tell origins apart."""
    votes: dict[str, Counter[Origin]] = {}
    voters: Counter[str] = Counter()
    for each in entries:
        for kind, items in each.alignments.items():
            fitting = each.fitting(items)
            if 0 < len(fitting) < len(_ORIGINS):
                votes.setdefault(kind, Counter()).update(fitting)
                voters[kind] += 1
    return {
        kind: [each for each in _ORIGINS if found[each] >= _LEAST_VOTES * voters[kind]]
        for kind, found in votes.items()
    }


def _with_times(given: CutEntry, origins: Mapping[str, Sequence[Origin]]) -> CorpusEntry:
    entry, shifts = given.entry, given.shifts()
    supervision, duration = entry.cut.supervisions[0], entry.cut.duration
    kept, notes = {}, []
    for kind, items in given.alignments.items():
        usual, fitting = origins.get(kind, _ORIGINS), given.fitting(items)
        chosen = [each for each in fitting if each in usual] or fitting or usual
        # Few programs write times relative to a supervision within a cut.
        without_last = [each for each in chosen if each != "supervision"]
        found = [shifts[each] for each in (without_last if "cut" in chosen else chosen)]
        if not found or max(found) - min(found) > MOST_OUTSIDE:
            notes.append(f"lost their {kind} times, which {_UNCLEAR if fitting else _OUTSIDE}")
            continue
        inside = list(_clamped(items, found[0], duration))
        if len(inside) < _LEAST_INSIDE * len(items):
            notes.append(f"lost their {kind} times, which {_OUTSIDE}")
            continue
        if len(inside) < len(items):
            notes.append(f"lost some of their {kind} times, which {_OUTSIDE}")
        kept[kind] = inside
    changed = fastcopy(supervision, alignment=kept or None)
    cut = fastcopy(entry.cut, supervisions=[changed])
    return replace(entry, cut=cut, note=notes[0] if notes else "")


class _Span(NamedTuple):
    start: float
    end: float


def _spans(items: Items, shift: float) -> Iterator[_Span]:
    """The times of items, so many seconds later; NaN if they are no numbers."""
    for item in items:
        try:
            start = item.start + shift
            yield _Span(start, start + (item.duration or 0.0))
        except TypeError:
            yield _Span(math.nan, math.nan)


def _clamped(items: Items, shift: float, duration: float) -> Iterator[AlignmentItem]:
    """The items so many seconds later, clamped to 0 and the duration, without those outside."""
    for item, (start, end) in zip(items, _spans(items, shift), strict=True):
        if start <= end and start < duration and end > 0:
            start, end = max(start, 0.0), min(end, duration)
            yield item._replace(start=round(start, 8), duration=round(end - start, 8))


def trimmed(supervision: Any, duration: float) -> Any:
    """The part of a supervision within 0 and the duration. Alignments, whose times may have another
    origin, stay as they are."""
    inside = fastcopy(supervision, alignment=None).trim(duration)
    return fastcopy(inside, alignment=supervision.alignment)
