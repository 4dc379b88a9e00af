"""Word and character error rate: counts by type, and a confidence interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pruned_rnnt.decode.scoring.significance import REPLICATIONS, rate_interval


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """Reference and hypothesis of one utterance, as words (or characters)."""

    id: str
    reference: tuple[str, ...]
    hypothesis: tuple[str, ...]

    def characters(self) -> Transcript:
        """Both texts as characters, without spaces."""
        return Transcript(
            id=self.id,
            reference=tuple("".join(self.reference)),
            hypothesis=tuple("".join(self.hypothesis)),
        )


@dataclass(frozen=True, kw_only=True)
class ErrorCounts:
    """Errors of a set of utterances, in words (or characters); `+` adds two sets."""

    insertions: int = 0
    deletions: int = 0
    substitutions: int = 0
    reference_words: int = 0

    @property
    def errors(self) -> int:
        return self.insertions + self.deletions + self.substitutions

    @property
    def rate(self) -> float:
        """Errors per reference word; without reference words 0, or infinite if there are errors."""
        if self.reference_words == 0:
            return 0.0 if self.errors == 0 else float("inf")
        return self.errors / self.reference_words

    def __add__(self, other: ErrorCounts) -> ErrorCounts:
        return ErrorCounts(
            insertions=self.insertions + other.insertions,
            deletions=self.deletions + other.deletions,
            substitutions=self.substitutions + other.substitutions,
            reference_words=self.reference_words + other.reference_words,
        )

    def __str__(self) -> str:
        return (
            f"{self.rate:.2%} [{self.errors} / {self.reference_words}, {self.insertions} ins, "
            f"{self.deletions} del, {self.substitutions} sub]"
        )


def count_errors(transcripts: Sequence[Transcript]) -> ErrorCounts:
    """Sum the errors of the best alignment of each utterance."""
    import kaldialign

    total = ErrorCounts()
    for transcript in transcripts:
        distance = kaldialign.edit_distance(transcript.reference, transcript.hypothesis)
        total += ErrorCounts(
            insertions=distance["ins"],
            deletions=distance["del"],
            substitutions=distance["sub"],
            reference_words=len(transcript.reference),
        )
    return total


def confidence_interval(
    transcripts: Sequence[Transcript], replications: int = REPLICATIONS
) -> tuple[float, float]:
    """The 95% confidence interval of the error rate; see `rate_interval`."""
    errors = [count_errors([transcript]).errors for transcript in transcripts]
    words = [len(transcript.reference) for transcript in transcripts]
    return rate_interval(errors, words, replications=replications)
