"""Which two results are compared, the difference of their error rates and its significance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pruned_rnnt.decode.scoring.error_rates import ErrorCounts
from pruned_rnnt.decode.scoring.significance import PairedDifference, paired_difference
from pruned_rnnt.report.scored_set import ScoredSet, ScoredUtterance
from pruned_rnnt.run.result_file import ResultFile


def has_equal(result: ResultFile, others: Sequence[ResultFile]) -> bool:
    """Whether one of the others has equal settings, and the same data or set."""
    found = partner(result, others)
    return found is not None and not _unlike_settings(result, found)


def partner(result: ResultFile, others: Sequence[ResultFile]) -> ResultFile | None:
    """The result to compare with: of the same data or set, with equal settings if there is one.

    Args:
        others: newest first.
    """
    candidates = [other for other in others if _same_data(result, other)]
    candidates = candidates or [other for other in others if other.set_name == result.set_name]
    alike = [other for other in candidates if not _unlike_settings(result, other)]
    return next(iter(alike or candidates), None)


def _same_data(first: ResultFile, second: ResultFile) -> bool:
    return (
        first.inputs is not None
        and second.inputs is not None
        and first.inputs.utterances == second.inputs.utterances
    )


def _unlike_settings(first: ResultFile, second: ResultFile) -> list[str]:
    """The settings in which two results differ, or why they are unknown."""
    if first.inputs is None or second.inputs is None:
        old = first if first.inputs is None else second
        return [
            f"the settings of {old.stem} are unknown, because its scores file is missing, damaged "
            "or of version 0.1"
        ]
    return first.inputs.differing_settings(second.inputs)


def differences(first: ResultFile, second: ResultFile) -> list[str]:
    """Why a difference between two results says nothing about what they compare."""
    found = _unlike_settings(first, second)
    if first.inputs and second.inputs and first.inputs.model == second.inputs.model:
        # The settings are compared; but words and characters are not.
        return [line for line in found if line.startswith("decode.metric:")]
    return found


_SIGNIFICANT = 0.05
# Features of the same audio may differ by this in their mean, if other processors computed them.
_ROUNDING = 2e-3


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A set decoded twice.

    pairs: utterances that both results have, with the same reference and audio.
    left_out: number of other utterances.
    other_audio: how many of them have the same reference in both, and other audio.
    unlike: what else differs than the thing that is compared, the model or else the settings; the
        difference then says nothing about it.
    """

    first: ScoredSet
    second: ScoredSet
    pairs: tuple[tuple[ScoredUtterance, ScoredUtterance], ...]
    left_out: int
    other_audio: int = 0
    unlike: tuple[str, ...] = ()

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
            if self.other_audio:
                return f"Nothing to compare: the audio of {self.other_audio:,} utterances differs."
            return "Nothing to compare: the results have no reference words in common."
        if self.unlike:
            return (
                f"The {self.first.metric} is {self.first_errors.rate:.2%} for {names[0]} and "
                f"{self.second_errors.rate:.2%} for {names[1]}. They were not decoded alike, so "
                f"this does not compare the models: {'; '.join(self.unlike)}. Decode both with "
                "equal settings."
            )
        if found.difference == 0 and found.p_value == 1:
            return "Both have the same number of errors."
        word = "lower" if found.difference < 0 else "higher"
        points = 100 * abs(found.difference)
        sentence = (
            f"The {self.first.metric} of {names[1]} is {points:.2f} percentage points {word} than "
            f"that of {names[0]}"
        )
        if found.p_value < _SIGNIFICANT:
            return f"{sentence}, and the difference is significant at the 5% level."
        return (
            f"{sentence}, which may be chance: the difference is not significant at the 5% level."
        )


def compare(first: ScoredSet, second: ScoredSet) -> Comparison:
    """Pair the utterances of two results by their ids."""
    others = {utterance.id: utterance for utterance in second.utterances}
    same_text = [
        (utterance, others[utterance.id])
        for utterance in first.utterances
        if utterance.id in others
        and others[utterance.id].transcript.reference == utterance.transcript.reference
    ]
    pairs = tuple(pair for pair in same_text if _same_audio(*pair))
    names = {utterance.id for utterance in first.utterances} | others.keys()
    return Comparison(
        first=first,
        second=second,
        pairs=pairs,
        left_out=len(names) - len(pairs),
        other_audio=len(same_text) - len(pairs),
        unlike=tuple(differences(first.result, second.result)),
    )


def _same_audio(first: ScoredUtterance, second: ScoredUtterance) -> bool:
    """True if it is the same as far as is known."""
    one, other = first.audio, second.audio
    if one is None or other is None:
        return True
    return one.frames == other.frames and abs(one.mean - other.mean) <= _ROUNDING
