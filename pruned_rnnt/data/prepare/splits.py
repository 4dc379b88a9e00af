"""Which utterances are for training, which for validation and testing."""

from __future__ import annotations

import heapq
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pruned_rnnt.data.input.augmentation import derived_seed
from pruned_rnnt.data.prepare.corpus_entry import CorpusEntry

# The names that sources use for the three splits.
_ALIASES = {
    "train": ("train", "training", "tr"),
    "dev": ("dev", "valid", "validation", "val", "cv"),
    "test": ("test", "eval", "evaluation", "tt"),
}
_NO_LANGUAGE = "utterances without a language"
_WHY_NO_SPEAKERS = (
    "because speakers are unknown, or too few or with too many utterances to hold some out"
)
_WHY_SHARED_RECORDINGS = (
    "so may a recording, because recordings are too few or have too many utterances to hold some "
    "out"
)
# Candidates that `_draw` keeps beyond those wanted, because some of these may be too large.
_MORE_CANDIDATES = 1000


@dataclass(frozen=True)
class SplitPlan:
    """Assigns a split to every entry; the same entries and seed give the same splits.

    from_source: the source names the splits of at least one language. What is held out is then
        only of training entries.
    by_speaker: the languages of which whole speakers are held out, so that what is drawn from them
        shares no speaker with train in this language.
    speakers: the split of each held-out (language, speaker) of these languages.
    recordings: the split of each held-out (language, recording) of the others
        (`CorpusEntry.recording`).
    utterances: the split of each held-out utterance id of languages of which no whole recordings
        can be held out. All else is training.
    languages: those of the utterances of train before any are held out; "" where it is unknown.
    unnamed: number of utterances without a split in languages of which the source names splits.
    """

    from_source: bool
    by_speaker: frozenset[str] = frozenset()
    speakers: dict[tuple[str, str], str] = field(default_factory=dict)
    recordings: dict[tuple[str, str], str] = field(default_factory=dict)
    utterances: dict[str, str] = field(default_factory=dict)
    languages: frozenset[str] = frozenset()
    unnamed: int = 0

    def split_of(self, entry: CorpusEntry) -> str | None:
        """The split; None if the source names an unknown split."""
        if self.from_source and not _is_train(entry):
            return split_name(entry.split)
        if entry.language in self.by_speaker:
            return self.speakers.get((entry.language, entry.speaker), "train")
        drawn = self.recordings.get((entry.language, entry.recording))
        return drawn or self.utterances.get(entry.id, "train")

    def describe(self) -> str:
        if self.from_source:
            plural = "s" * (self.unnamed != 1)
            unnamed = f"; {self.unnamed} utterance{plural} without a split counted as train"
            return f"splits as the source names them{unnamed * (self.unnamed > 0)}{self._drawn()}"
        if not self.by_speaker:
            return f"a speaker may be in several splits, {_WHY_NO_SPEAKERS}{self._shared()}"
        if not (self.recordings or self.utterances):
            one = " of one language" * (len(self.by_speaker) > 1)
            return f"no speaker is in two splits{one}"
        languages = ", ".join(sorted(name or _NO_LANGUAGE for name in self.by_speaker))
        return (
            f"no speaker is in two splits of {languages}; in other languages one may be, "
            f"{_WHY_NO_SPEAKERS}{self._shared()}"
        )

    def _shared(self) -> str:
        if self.utterances:
            return f"; {_WHY_SHARED_RECORDINGS}"
        several = len(self.languages) > 1 and bool(self.recordings)
        return "; each language of a recording is drawn by itself" * several

    def _drawn(self) -> str:
        drawn = ""
        for kind, names, splits in (
            ("speaker", {speaker for _, speaker in self.speakers}, self.speakers.values()),
            ("recording", {name for _, name in self.recordings}, self.recordings.values()),
            ("utterance", set(self.utterances), self.utterances.values()),
        ):
            if names:
                plural = "s" * (len(names) > 1)
                drawn += f"; {len(names)} {kind}{plural} of train became {_names(splits)}"
        if self.recordings or self.utterances:
            drawn += f", of speakers who may be in train too, {_WHY_NO_SPEAKERS}"
        return drawn + self._shared()


def _names(splits: Iterable[str]) -> str:
    return " and ".join(sorted(set(splits)))


@dataclass(frozen=True)
class NamedSplits:
    """Every entry names its own split; any name is valid."""

    def split_of(self, entry: CorpusEntry) -> str | None:
        return entry.split

    def describe(self) -> str:
        return "splits of the corpus"


@dataclass(frozen=True)
class SingleSplit:
    """Every entry belongs to the split `name`."""

    name: str

    def split_of(self, entry: CorpusEntry) -> str | None:
        return self.name

    def describe(self) -> str:
        return f"everything is in the {self.name} split"


def split_name(name: str) -> str | None:
    """`train`, `dev` or `test` for one of their aliases; an empty name is `train`."""
    name = name.strip().lower()
    if not name:
        return "train"
    return next((split for split, names in _ALIASES.items() if name in names), None)


def plan_splits(
    entries: Iterable[CorpusEntry],
    *,
    dev_share: float,
    test_share: float,
    max_held_out: int,
    seed: int,
) -> SplitPlan:
    """Reads all entries up to three times and decides their splits, language by language.

    If any entry of a language names a split, the source decides; if it has no dev split, dev is
    drawn from train, because training needs a split to validate on. Otherwise dev and test are
    drawn, so that both have all languages. For utterances without a language, the splits named for
    any language count. Whole speakers are drawn until dev and test have their shares of the
    utterances. This needs a speaker for every utterance of train in this language, and enough
    speakers that none takes more than about twice the share. Otherwise whole recordings are drawn,
    or, if these are too few or too large in the same way, single utterances. A recording that has
    several languages may be in several splits, one for each language. dev and test get about
    `max_held_out` utterances each at most, and with whole speakers or recordings twice as many.
    Entries with a problem are neither drawn nor counted. Memory holds a count per speaker, or eight
    bytes per utterance and the names of the recordings held out.

    Raises:
        ValueError: shares out of range, or `max_held_out` below 1.
    """
    for name, share in (("dev", dev_share), ("test", test_share)):
        if not 0 <= share < 0.5:
            raise ValueError(f"--{name}-share must be at least 0 and below 0.5, got {share}")
    if max_held_out < 1:
        raise ValueError(f"--held-out-most must be at least 1, got {max_held_out}")
    # By language: the number of utterances of each speaker, and the splits that the source names.
    speakers: defaultdict[str, Counter[str]] = defaultdict(Counter)
    named: defaultdict[str, set[str | None]] = defaultdict(set)
    blank: Counter[str] = Counter()
    total = unnamed = 0
    for entry in entries:
        if entry.split:
            named[entry.language].add(split_name(entry.split))
        if _is_train(entry) and not entry.problem:
            total += 1
            speakers[entry.language][entry.speaker] += 1
            blank[entry.language] += not entry.split.strip()
    by_speaker: set[str] = set()
    held_out: dict[tuple[str, str], str] = {}
    others: dict[str, _Wanted] = {}
    for language, own in sorted(speakers.items()):
        own_total = total if len(speakers) < 2 else own.total()
        names = named[language] if language else set().union(*named.values())
        unnamed += blank[language] if names else 0
        shares = {
            "dev": 0.0 if "dev" in names else dev_share,
            "test": 0.0 if names else test_share,
        }
        most = max(1, round(max_held_out * own_total / total))
        wanted = _Wanted(_counts(shares, own_total, most), own_total, most)
        drawn = None if "" in own else _held_out(_shuffled(own, seed), own, wanted)
        if drawn is not None:
            by_speaker.add(language)
            held_out |= {(language, speaker): split for speaker, split in drawn.items()}
        elif any(wanted.counts.values()):
            others[language] = wanted
    recordings = _draw(entries, others, seed, lambda entry: entry.recording)
    single = {language: others[language] for language in others.keys() - recordings.keys()}
    utterances = _draw(entries, single, seed, lambda entry: entry.id)
    return SplitPlan(
        from_source=any(named.values()),
        by_speaker=frozenset(by_speaker),
        speakers=held_out,
        recordings={
            (language, name): split
            for language, own in recordings.items()
            for name, split in own.items()
        },
        utterances={name: split for own in utterances.values() for name, split in own.items()},
        languages=frozenset(speakers),
        unnamed=unnamed,
    )


class _Wanted(NamedTuple):
    """What to hold out of one language: counts, the number of utterances for each split, of
    `total`; a split may get a whole speaker or recording more, and about twice `most` at most."""

    counts: Mapping[str, int]
    total: int
    most: int


def _counts(shares: Mapping[str, float], total: int, most: int) -> dict[str, int]:
    """The number of utterances to draw for each split.

    A tiny corpus gives its first utterance to train, the second to dev, the third to test.
    """
    return {
        split: min(most, max(1, round(share * total))) if share > 0 and total > others else 0
        for others, (split, share) in enumerate(shares.items(), start=1)
    }


def _shuffled(speakers: Iterable[str], seed: int) -> list[str]:
    return sorted(speakers, key=lambda speaker: (derived_seed("split", seed, speaker), speaker))


def _held_out(
    order: Sequence[str], sizes: Mapping[str, int], wanted: _Wanted
) -> dict[str, str] | None:
    """Fills dev, then test, with speakers or recordings in this order; None if that leaves too
    little. sizes: the number of utterances of each."""
    held_out: dict[str, str] = {}
    for split, count in wanted.counts.items():
        taken = 0
        for name in order:
            if taken >= count:
                break
            # One with far more utterances than wanted stays in training.
            limit = min(2 * count + 0.1 * wanted.total, 2 * wanted.most)
            if name in held_out or taken + sizes[name] > limit:
                continue
            held_out[name] = split
            taken += sizes[name]
        if count and not taken:
            return None
    return held_out if sum(sizes[name] for name in held_out) < wanted.total else None


def _draw(
    entries: Iterable[CorpusEntry],
    wanted: Mapping[str, _Wanted],
    seed: int,
    group_of: Callable[[CorpusEntry], str],
) -> dict[str, dict[str, str]]:
    """By language, the split of each group drawn, without languages for which it leaves too little.

    Draws utterances, those of the smallest seeds, in one pass over the entries; all others of
    their groups come with them.
    """
    if not wanted:
        return {}
    # By language: the rank of each candidate, and a hash of the group of each utterance.
    ranks: dict[str, dict[str, tuple[int, str]]] = {language: {} for language in wanted}
    hashes = {language: array("q") for language in wanted}
    most = {
        language: sum(each.counts.values()) + _MORE_CANDIDATES for language, each in wanted.items()
    }
    for entry in entries:
        language = entry.language
        if entry.problem or language not in wanted or not _is_train(entry):
            continue
        own, group = ranks[language], group_of(entry)
        rank = (-derived_seed("split", seed, entry.id), entry.id)
        own[group] = max(rank, own.get(group, rank))
        hashes[language].append(hash(group))
        if len(own) > 2 * most[language]:
            ranks[language] = {name: own[name] for name in _first(own, most[language])}
    drawn = {}
    for language, own in ranks.items():
        order = _first(own, most[language])
        ordered = np.frombuffer(hashes[language], dtype=np.int64)
        ordered.sort()  # in place: a copy would double the memory
        ends = [np.searchsorted(ordered, [*map(hash, order)], side) for side in ("left", "right")]
        sizes = dict(zip(order, (ends[1] - ends[0]).tolist(), strict=True))
        held_out = _held_out(order, sizes, wanted[language])
        if held_out is not None:
            drawn[language] = held_out
    return drawn


def _first(ranks: Mapping[str, tuple[int, str]], count: int) -> list[str]:
    return heapq.nlargest(count, ranks, key=ranks.__getitem__)


def _is_train(entry: CorpusEntry) -> bool:
    return split_name(entry.split) == "train"
