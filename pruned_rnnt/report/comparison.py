"""Two results of the same set: the difference of their error rates and its significance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pruned_rnnt.decode.scoring.significance import PairedDifference, paired_difference
from pruned_rnnt.decode.scoring.wer import ErrorCounts
from pruned_rnnt.report.scored_set import ScoredSet, ScoredUtterance

SIGNIFICANT = 0.05


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A set decoded twice.

    pairs: utterances that both results have, with the same reference.
    left_out: number of utterances that only one has, or whose references differ.
    """

    first: ScoredSet
    second: ScoredSet
    pairs: tuple[tuple[ScoredUtterance, ScoredUtterance], ...]
    left_out: int

    @cached_property
    def first_errors(self) -> ErrorCounts:
        return sum((first.errors for first, _ in self.pairs), ErrorCounts())

    @cached_property
    def second_errors(self) -> ErrorCounts:
        return sum((second.errors for _, second in self.pairs), ErrorCounts())

    @cached_property
    def difference(self) -> PairedDifference:
        """Error rate of the second result minus that of the first, by paired bootstrap."""
        return paired_difference(
            [first.errors.errors for first, _ in self.pairs],
            [second.errors.errors for _, second in self.pairs],
            [first.errors.reference_words for first, _ in self.pairs],
        )

    @property
    def better(self) -> int:
        """Number of utterances in which the second result has fewer errors."""
        return sum(second.errors.errors < first.errors.errors for first, second in self.pairs)

    @property
    def worse(self) -> int:
        """Number of utterances in which the second result has more errors."""
        return sum(second.errors.errors > first.errors.errors for first, second in self.pairs)

    def verdict(self, names: Sequence[str]) -> str:
        """One sentence about the difference; names: of the first and the second result."""
        found = self.difference
        if not self.pairs or found.difference != found.difference:
            return "Nothing to compare: the results have no reference words in common."
        if found.difference == 0 and found.p_value == 1:
            return "Both have the same number of errors."
        word = "lower" if found.difference < 0 else "higher"
        points = 100 * abs(found.difference)
        sentence = (
            f"The {self.first.metric} of {names[1]} is {points:.2f} percentage points {word} than "
            f"that of {names[0]}"
        )
        if found.p_value < SIGNIFICANT:
            return f"{sentence}, and the difference is significant at the 5% level."
        return (
            f"{sentence}, which may be chance: the difference is not significant at the 5% level."
        )


def compare(first: ScoredSet, second: ScoredSet) -> Comparison:
    """Pair the utterances of two results by their ids."""
    others = {utterance.id: utterance for utterance in second.utterances}
    pairs = tuple(
        (utterance, others[utterance.id])
        for utterance in first.utterances
        if utterance.id in others
        and others[utterance.id].transcript.reference == utterance.transcript.reference
    )
    names = {utterance.id for utterance in first.utterances} | others.keys()
    return Comparison(first=first, second=second, pairs=pairs, left_out=len(names) - len(pairs))
