"""Which utterances are for training, which for validation and testing."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class SplitPlan:
    """Assigns a split to every entry; the same entries and seed give the same splits.

    from_source: the source names the splits of at least one language. What is held out is then
        only of training entries.
    by_speaker: the languages of which whole speakers are held out, so that what is drawn from them
        shares no speaker with train in this language.
    speakers: the split of each held-out (language, speaker) of these languages.
    utterances: the split of each held-out utterance id of the others; all else is training.
    unnamed: number of utterances without a split in languages of which the source names splits.
    """

    from_source: bool
    by_speaker: frozenset[str] = frozenset()
    speakers: dict[tuple[str, str], str] = field(default_factory=dict)
    utterances: dict[str, str] = field(default_factory=dict)
    unnamed: int = 0

    def split_of(self, entry: CorpusEntry) -> str | None:
        """The split; None if the source names an unknown split."""
        if self.from_source and not _is_train(entry):
            return split_name(entry.split)
        if entry.language in self.by_speaker:
            return self.speakers.get((entry.language, entry.speaker), "train")
        return self.utterances.get(entry.id, "train")

    def describe(self) -> str:
        if self.from_source:
            plural = "s" * (self.unnamed != 1)
            unnamed = f"; {self.unnamed} utterance{plural} without a split counted as train"
            return f"splits as the source names them{unnamed * (self.unnamed > 0)}{self._drawn()}"
        if not self.by_speaker:
            return f"a speaker may be in several splits, {_WHY_NO_SPEAKERS}"
        if not self.utterances:
            one = " of one language" * (len(self.by_speaker) > 1)
            return f"no speaker is in two splits{one}"
        languages = ", ".join(sorted(name or _NO_LANGUAGE for name in self.by_speaker))
        return (
            f"no speaker is in two splits of {languages}; in other languages one may be, "
            f"{_WHY_NO_SPEAKERS}"
        )

    def _drawn(self) -> str:
        drawn = ""
        if self.speakers:
            count = len({speaker for _, speaker in self.speakers})
            plural = "s" * (count > 1)
            drawn = f"; {count} speaker{plural} of train became {_names(self.speakers.values())}"
        if self.utterances:
            drawn += (
                f"; {len(self.utterances)} train utterances became "
                f"{_names(self.utterances.values())}, of speakers who may be in train too, "
                f"{_WHY_NO_SPEAKERS}"
            )
        return drawn


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
    """Reads all entries once or twice and decides their splits, language by language.

    If any entry of a language names a split, the source decides; if it has no dev split, dev is
    drawn from train, because training needs a split to validate on. Otherwise dev and test are
    drawn, so that both have all languages. For utterances without a language, the splits named for
    any language count. Whole speakers are drawn until dev and test have their shares of the
    utterances. This needs a speaker for every utterance of train in this language, and enough
    speakers that none takes more than about twice the share. Otherwise single utterances are drawn.
    dev and test get about `max_held_out` utterances each at most, and with whole speakers twice as
    many. Entries with a problem are neither drawn nor counted. Memory holds a count per speaker, or
    the ids of the utterances held out.

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
    single: dict[str, dict[str, int]] = {}
    for language, own in sorted(speakers.items()):
        own_total = total if len(speakers) < 2 else own.total()
        names = named[language] if language else set().union(*named.values())
        unnamed += blank[language] if names else 0
        shares = {
            "dev": 0.0 if "dev" in names else dev_share,
            "test": 0.0 if names else test_share,
        }
        most = max(1, round(max_held_out * own_total / total))
        wanted = _wanted(shares, own_total, most)
        drawn = None if "" in own else _draw_speakers(own, wanted, own_total, most, seed)
        if drawn is not None:
            by_speaker.add(language)
            held_out |= {(language, speaker): split for speaker, split in drawn.items()}
        elif any(wanted.values()):
            single[language] = wanted
    return SplitPlan(
        from_source=any(named.values()),
        by_speaker=frozenset(by_speaker),
        speakers=held_out,
        utterances=_draw_utterances(entries, single, seed) if single else {},
        unnamed=unnamed,
    )


def _wanted(shares: Mapping[str, float], total: int, most: int) -> dict[str, int]:
    """The number of utterances to draw for each split.

    A tiny corpus gives its first utterance to train, the second to dev, the third to test.
    """
    return {
        split: min(most, max(1, round(share * total))) if share > 0 and total > others else 0
        for others, (split, share) in enumerate(shares.items(), start=1)
    }


def _draw_speakers(
    speakers: Counter[str], wanted: dict[str, int], total: int, most: int, seed: int
) -> dict[str, str] | None:
    """Fills dev, then test, with speakers in random order; None if that leaves too little."""
    order = sorted(speakers, key=lambda speaker: (derived_seed("split", seed, speaker), speaker))
    held_out: dict[str, str] = {}
    for split, count in wanted.items():
        taken = 0
        for speaker in order:
            if taken >= count:
                break
            # A speaker with far more utterances than wanted stays in training.
            limit = min(2 * count + 0.1 * total, 2 * most)
            if speaker in held_out or taken + speakers[speaker] > limit:
                continue
            held_out[speaker] = split
            taken += speakers[speaker]
        if count and not taken:
            return None
    return held_out if len(held_out) < len(speakers) else None


def _draw_utterances(
    entries: Iterable[CorpusEntry], wanted: Mapping[str, Mapping[str, int]], seed: int
) -> dict[str, str]:
    """The split of each utterance drawn, by id; wanted: by language, the number for each split.

    Keeps the utterances of the smallest seeds in one pass over the entries.
    """
    drawn: dict[str, list[tuple[int, str]]] = {language: [] for language in wanted}
    for entry in entries:
        if entry.problem or entry.language not in drawn or not _is_train(entry):
            continue
        heap = drawn[entry.language]
        item = (-derived_seed("split", seed, entry.id), entry.id)
        if len(heap) < sum(wanted[entry.language].values()):
            heapq.heappush(heap, item)
        else:
            heapq.heappushpop(heap, item)
    return {
        name: "dev" if index < wanted[language]["dev"] else "test"
        for language, heap in drawn.items()
        for index, (_, name) in enumerate(sorted(heap, reverse=True))
    }


def _is_train(entry: CorpusEntry) -> bool:
    return split_name(entry.split) == "train"
