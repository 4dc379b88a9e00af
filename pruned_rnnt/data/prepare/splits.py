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


@dataclass(frozen=True)
class SplitPlan:
    """Assigns a split to every entry; the same entries and seed give the same splits.

    from_source: the source names the splits.
    by_speaker: whole speakers are held out, so that what is drawn shares no speaker with train.
    held_out: split by speaker (with `by_speaker`) or by utterance id; all others are training.
        With `from_source` it holds training speakers or utterances that become dev, if the source
        has no dev.
    """

    from_source: bool
    by_speaker: bool
    held_out: dict[str, str] = field(default_factory=dict)

    def split_of(self, entry: CorpusEntry) -> str | None:
        """The split; None if the source names an unknown split."""
        if self.from_source and not _is_train(entry):
            return split_name(entry.split)
        return self.held_out.get(entry.speaker if self.by_speaker else entry.id, "train")

    def describe(self) -> str:
        if self.from_source:
            return f"splits as the source names them{self._drawn()}"
        if self.by_speaker:
            return "no speaker is in two splits"
        return (
            "a speaker may be in several splits, because speakers are unknown or too few to hold "
            "some out"
        )

    def _drawn(self) -> str:
        if not self.held_out:
            return ""
        if self.by_speaker:
            count = len(self.held_out)
            return f"; dev is {count} speaker{'s' * (count > 1)} of train, held out from it"
        return (
            f"; {len(self.held_out)} train utterances became dev, of speakers who may be in train "
            "too, because speakers are unknown or too few to hold some out"
        )


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
    """Reads all entries once or twice and decides their splits.

    If any entry names a split, the source decides; if it has no dev split, dev is drawn from train,
    because training needs a split to validate on. Otherwise dev and test are drawn. Whole speakers
    are drawn until dev and test have their shares of the utterances. This needs a speaker for
    every utterance of train, and enough speakers that none takes more than about twice the share.
    Otherwise single utterances are drawn. Of several languages, each is drawn from by itself, so
    that dev and test have all of them. dev and test get about `max_held_out` utterances each at
    most. Memory holds a count per speaker, or the ids of the utterances held out.

    Raises:
        ValueError: shares out of range, or `max_held_out` below 1.
    """
    for name, share in (("dev", dev_share), ("test", test_share)):
        if not 0 <= share < 0.5:
            raise ValueError(f"--{name}-share must be at least 0 and below 0.5, got {share}")
    if max_held_out < 1:
        raise ValueError(f"--held-out-most must be at least 1, got {max_held_out}")
    # By language: the number of utterances of each speaker.
    speakers: defaultdict[str, Counter[str]] = defaultdict(Counter)
    splits: Counter[str | None] = Counter()
    from_source = False
    for entry in entries:
        from_source = from_source or bool(entry.split)
        splits[split_name(entry.split)] += 1
        if _is_train(entry) and not entry.problem:
            speakers[entry.language][entry.speaker] += 1
    shares = {"dev": dev_share, "test": test_share}
    if from_source:
        shares = {"dev": 0.0 if splits["dev"] else dev_share, "test": 0.0}
    total = splits["train"]
    if len(speakers) < 2:
        totals = dict.fromkeys(speakers, total)
    else:
        totals = {language: own.total() for language, own in speakers.items()}
    wanted = {
        language: _wanted(shares, own_total, max_held_out * own_total / max(total, 1))
        for language, own_total in sorted(totals.items())
    }
    if from_source and not any(counts["dev"] for counts in wanted.values()):
        return SplitPlan(from_source=True, by_speaker=False)
    if not any("" in own for own in speakers.values()):
        parts = [
            _draw_speakers(speakers[language], counts, totals[language], seed)
            for language, counts in wanted.items()
        ]
        drawn = {name: split for part in parts if part for name, split in part.items()}
        if None not in parts and len(drawn) < len(set().union(*speakers.values())):
            return SplitPlan(from_source=from_source, by_speaker=True, held_out=drawn)
    held_out: dict[str, str] = {}
    for language, counts in wanted.items():
        train = (each for each in entries if _is_train(each) and each.language == language)
        held_out |= _draw_utterances(train, counts, seed)
    return SplitPlan(from_source=from_source, by_speaker=False, held_out=held_out)


def _wanted(shares: Mapping[str, float], total: int, most: float) -> dict[str, int]:
    """The number of utterances to draw for each split.

    A tiny corpus gives its first utterance to train, the second to dev, the third to test.
    """
    return {
        split: min(max(1, round(most)), max(1, round(share * total)))
        if share > 0 and total > others
        else 0
        for others, (split, share) in enumerate(shares.items(), start=1)
    }


def _draw_speakers(
    speakers: Counter[str], wanted: dict[str, int], total: int, seed: int
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
            if speaker in held_out or taken + speakers[speaker] > 2 * count + 0.1 * total:
                continue
            held_out[speaker] = split
            taken += speakers[speaker]
        if count and not taken:
            return None
    return held_out if len(held_out) < len(speakers) else None


def _draw_utterances(
    entries: Iterable[CorpusEntry], wanted: dict[str, int], seed: int
) -> dict[str, str]:
    count = sum(wanted.values())
    drawn = heapq.nsmallest(
        count,
        (
            (derived_seed("split", seed, entry.id), entry.id)
            for entry in entries
            if not entry.problem
        ),
    )
    names = [name for _, name in drawn]
    return {name: "dev" if index < wanted["dev"] else "test" for index, name in enumerate(names)}


def _is_train(entry: CorpusEntry) -> bool:
    return split_name(entry.split) == "train"
