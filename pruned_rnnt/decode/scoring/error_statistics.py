"""Aligned words of references and hypotheses: counts of correct and wrong words, lost runs, and the
quality of word confidences.

A lost run is a run of reference words that the hypothesis leaves out: lost, not misheard.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pruned_rnnt.decode.scoring.error_rates import Transcript

# A word of the reference and of the hypothesis; None: no word on this side.
WordPair = tuple[str | None, str | None]

# Of the table that an alignment fills; 4 bytes each.
_MOST_CELLS = 4 * 10**8
_GAP = "*"
LEAST_WORDS = 3
# Confidences of 0 and 1 count as these; more digits are not printed.
_LEAST, _MOST = 1e-4, 1 - 1e-4


def can_align(reference: Sequence[str], hypothesis: Sequence[str]) -> bool:
    """Whether `align_words` takes texts of these lengths."""
    return len(reference) * len(hypothesis) <= _MOST_CELLS


def align_words(reference: Sequence[str], hypothesis: Sequence[str]) -> list[WordPair]:
    """The alignment with the fewest errors, the one that `count_errors` counts.

    Raises:
        ValueError: the product of the lengths is above 4e8, for which it would need gigabytes.
    """
    import kaldialign

    if not can_align(reference, hypothesis):
        raise ValueError(
            f"a reference of {len(reference):,} and a hypothesis of {len(hypothesis):,} words or "
            "characters are too long to align"
        )
    # Marked, so that no word of a text equals the sign of a gap.
    pairs = kaldialign.align(
        [f"={word}" for word in reference], [f"={word}" for word in hypothesis], _GAP
    )
    return [
        (None if expected == _GAP else expected[1:], None if found == _GAP else found[1:])
        for expected, found in pairs
    ]


@dataclass
class WordCounts:
    """How often a word was correct, and how often it was part of each kind of error."""

    correct: int = 0
    replaced: int = 0
    replacing: int = 0
    inserted: int = 0
    deleted: int = 0

    @property
    def errors(self) -> int:
        return self.replaced + self.replacing + self.inserted + self.deleted

    @property
    def in_reference(self) -> int:
        return self.correct + self.replaced + self.deleted

    @property
    def in_hypothesis(self) -> int:
        return self.correct + self.replacing + self.inserted


@dataclass
class ErrorStatistics:
    """Errors by kind and by word; substitutions are counted by (reference, hypothesis)."""

    substitutions: Counter[tuple[str, str]] = field(default_factory=Counter)
    deletions: Counter[str] = field(default_factory=Counter)
    insertions: Counter[str] = field(default_factory=Counter)
    words: dict[str, WordCounts] = field(default_factory=dict)

    def add(self, pairs: Iterable[WordPair]) -> None:
        """Count the aligned words of one utterance."""
        for reference, hypothesis in pairs:
            if reference is None and hypothesis is not None:
                self.insertions[hypothesis] += 1
                self._word(hypothesis).inserted += 1
            elif reference is not None and hypothesis is None:
                self.deletions[reference] += 1
                self._word(reference).deleted += 1
            elif reference is not None and reference == hypothesis:
                self._word(reference).correct += 1
            elif reference is not None and hypothesis is not None:
                self.substitutions[(reference, hypothesis)] += 1
                self._word(reference).replaced += 1
                self._word(hypothesis).replacing += 1

    def _word(self, word: str) -> WordCounts:
        return self.words.setdefault(word, WordCounts())


def lost_runs(transcript: Transcript, least: int = LEAST_WORDS) -> list[range]:
    """Positions of `least` or more reference words in a row that the best alignment deletes; none
    of texts that are too long to align."""
    if not can_align(transcript.reference, transcript.hypothesis):
        return []
    return lost_runs_of_pairs(align_words(transcript.reference, transcript.hypothesis), least)


def lost_runs_of_pairs(pairs: Iterable[WordPair], least: int = LEAST_WORDS) -> list[range]:
    """As `lost_runs`, of aligned words. Insertions do not end a run: they may stand for words."""
    found = []
    begin = place = 0
    for reference, hypothesis in pairs:
        if reference is None:
            continue
        if hypothesis is not None:
            found.append(range(begin, place))
            begin = place + 1
        place += 1
    found.append(range(begin, place))
    return [run for run in found if len(run) >= least]


def right_words(reference: Sequence[str], hypothesis: Sequence[str]) -> list[bool]:
    """For each word of the hypothesis, whether the best alignment has it in the reference.

    Raises:
        ValueError: as for `align_words`.
    """
    pairs = align_words(reference, hypothesis)
    return [expected == found for expected, found in pairs if found is not None]


def normalised_cross_entropy(confidences: Sequence[float], right: Sequence[bool]) -> float:
    """1 for perfect confidences, 0 for those no more informative than the share of correct words.

    The measure of NIST's evaluations (Siu, Gish and Richardson 1997): how much of the entropy of
    'this word is correct' the confidences explain; negative if they mislead. NaN if all words, or
    none, are correct.
    """
    count, total = sum(right), len(right)
    if count in (0, total):
        return math.nan
    share = count / total
    most = -count * math.log(share) - (total - count) * math.log(1 - share)
    bounded = [min(max(confidence, _LEAST), _MOST) for confidence in confidences]
    entropy = -sum(
        math.log(confidence if is_right else 1 - confidence)
        for confidence, is_right in zip(bounded, right, strict=True)
    )
    return 1 - entropy / most
