"""Which utterances are for training, which for validation and testing."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pruned_rnnt.data.input.augmentation import derived_seed
from pruned_rnnt.data.prepare.entries import Entry

# Names by which sources call the three splits.
_ALIASES = {
    "train": ("train", "training", "tr"),
    "dev": ("dev", "valid", "validation", "val", "cv"),
    "test": ("test", "eval", "evaluation", "tt"),
}


@dataclass(frozen=True)
class SplitPlan:
    """Assigns a split to every entry; the same entries and seed give the same splits.

    given: the source itself names the splits. held_out: group -> split, everything else is
    training; a group is a speaker, or an utterance where speakers are unknown or too few. With
    `given`, utterances of training that become dev, as the source has none.
    by_speaker: no speaker is in two splits.
    """

    given: bool
    by_speaker: bool
    held_out: dict[str, str] = field(default_factory=dict)

    def split_of(self, entry: Entry) -> str | None:
        """The split; None when the source names one that is not known."""
        if self.given and not _is_train(entry):
            return split_name(entry.split)
        return self.held_out.get(_group(entry, self.by_speaker), "train")

    def describe(self) -> str:
        if self.given:
            drawn = f"; {len(self.held_out)} of train became dev" if self.held_out else ""
            return f"splits as the source names them{drawn}"
        if self.by_speaker:
            return "no speaker is in two splits"
        return "speakers unknown, or too few to part them: a speaker may be in several splits"


@dataclass(frozen=True)
class NamedSplits:
    """Every entry carries the name of its split, whatever that is."""

    def split_of(self, entry: Entry) -> str | None:
        return entry.split

    def describe(self) -> str:
        return "splits of the corpus"


@dataclass(frozen=True)
class OneSplit:
    """Every entry is of `name`."""

    name: str

    def split_of(self, entry: Entry) -> str | None:
        return self.name

    def describe(self) -> str:
        return f"everything is {self.name}"


def split_name(name: str) -> str | None:
    """`train`, `dev` or `test` for one of their names; an empty name is `train`."""
    name = name.strip().lower()
    if not name:
        return "train"
    return next((split for split, names in _ALIASES.items() if name in names), None)


def plan_splits(
    entries: Iterable[Entry], *, dev_share: float, test_share: float, most: int, seed: int
) -> SplitPlan:
    """Reads all entries once or twice to find their splits.

    Where any entry names a split, the source decides; only when none is dev, dev is drawn from
    train, utterance by utterance, since training validates on it. Otherwise whole speakers are
    drawn until dev and test have their shares of the utterances, if every utterance has a speaker
    and there are three speakers or more, of which none takes more than its share doubled.
    Otherwise utterances are drawn one by one. dev and test get about `most` utterances each at
    most. Memory: a count per speaker, or the names of the utterances held out.

    Raises:
        ValueError: shares out of range, or `most` below 1.
    """
    for name, share in (("dev", dev_share), ("test", test_share)):
        if not 0 <= share < 0.5:
            raise ValueError(f"the share of {name} must lie in [0, 0.5), got {share}")
    if most < 1:
        raise ValueError(f"dev and test need at least 1 utterance, got {most}")
    speakers: Counter[str] = Counter()
    splits: Counter[str | None] = Counter()
    given = False
    for entry in entries:
        given = given or bool(entry.split)
        splits[split_name(entry.split)] += 1
        speakers[entry.speaker] += 1
    # Something is left for training first, then for dev.
    total = splits["train"]
    wanted = {
        split: min(most, max(1, round(share * total))) if share > 0 and total > others else 0
        for split, share, others in (("dev", dev_share, 1), ("test", test_share, 2))
    }
    if given:
        wanted = {"dev": 0 if splits["dev"] else wanted["dev"], "test": 0}
        train = (entry for entry in entries if _is_train(entry)) if wanted["dev"] else ()
        held_out = _draw_utterances(train, wanted, seed)
        return SplitPlan(given=True, by_speaker=False, held_out=held_out)
    if "" not in speakers:
        drawn = _draw_speakers(speakers, wanted, total, seed)
        if drawn is not None:
            return SplitPlan(given=False, by_speaker=True, held_out=drawn)
    return SplitPlan(
        given=False, by_speaker=False, held_out=_draw_utterances(entries, wanted, seed)
    )


def _draw_speakers(
    speakers: Counter[str], wanted: dict[str, int], total: int, seed: int
) -> dict[str, str] | None:
    """Speakers in random order fill dev, then test; None when that takes most of the data."""
    order = sorted(speakers, key=lambda speaker: (derived_seed("split", seed, speaker), speaker))
    held_out: dict[str, str] = {}
    for split, count in wanted.items():
        taken = 0
        for speaker in order:
            if taken >= count:
                break
            # A speaker who says far more than what is wanted would take training's data.
            if speaker in held_out or taken + speakers[speaker] > 2 * count + 0.1 * total:
                continue
            held_out[speaker] = split
            taken += speakers[speaker]
        if count and not taken:
            return None
    return held_out if len(held_out) < len(speakers) else None


def _draw_utterances(entries: Iterable[Entry], wanted: dict[str, int], seed: int) -> dict[str, str]:
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


def _is_train(entry: Entry) -> bool:
    return split_name(entry.split) == "train"


def _group(entry: Entry, by_speaker: bool) -> str:
    return entry.speaker if by_speaker else entry.id
