"""Word and character error rates of a set: counts by type, the metric that describes the set, and
languages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pruned_rnnt.data.tokens.text_normalisation import written_without_spaces
from pruned_rnnt.decode.scoring.significance import REPLICATIONS, rate_interval

Metric = Literal["wer", "cer"]
MetricChoice = Literal["auto", "wer", "cer"]
# With a larger share of references without spaces, a WER would mostly count whole sentences.
_MOST_WITHOUT_SPACES = 0.1


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


@dataclass(frozen=True, kw_only=True)
class SetErrors:
    """The errors of a set of utterances; `+` adds two sets.

    references: number of references with a word; without_spaces: how many of them are written
        without spaces between words.
    """

    words: ErrorCounts = field(default_factory=ErrorCounts)
    characters: ErrorCounts = field(default_factory=ErrorCounts)
    references: int = 0
    without_spaces: int = 0

    @classmethod
    def of(cls, transcripts: Sequence[Transcript]) -> SetErrors:
        """Of transcripts in words."""
        texts = [" ".join(each.reference) for each in transcripts if each.reference]
        return cls(
            words=count_errors(transcripts),
            characters=count_errors([each.characters() for each in transcripts]),
            references=len(texts),
            without_spaces=sum(map(written_without_spaces, texts)),
        )

    def __add__(self, other: SetErrors) -> SetErrors:
        return SetErrors(
            words=self.words + other.words,
            characters=self.characters + other.characters,
            references=self.references + other.references,
            without_spaces=self.without_spaces + other.without_spaces,
        )

    def metric(self, choice: MetricChoice) -> Metric:
        """The metric that describes the set; `auto` is cer if more than a tenth of the references
        are written without spaces."""
        if choice != "auto":
            return choice
        return "cer" if self.without_spaces > _MOST_WITHOUT_SPACES * self.references else "wer"

    def headline(self, choice: MetricChoice) -> ErrorCounts:
        """The errors that `metric` counts."""
        return self.words if self.metric(choice) == "wer" else self.characters

    def describe(self, choice: MetricChoice) -> str:
        """Both rates with their counts, the headline first."""
        rates = [f"WER {self.words}", f"CER {self.characters}"]
        return ", ".join(rates if self.metric(choice) == "wer" else reversed(rates))


@dataclass(frozen=True, kw_only=True)
class LanguageErrors:
    """The errors in one language; tagged: how many utterances got its tag, None without tags."""

    language: str
    utterances: int
    errors: SetErrors
    tagged: int | None = None


def errors_by_language(
    transcripts: Iterable[tuple[Transcript, str, str]], *, has_tags: bool
) -> list[LanguageErrors]:
    """The errors of each language, in the order of their codes.

    Args:
        transcripts: in words, each with the languages of reference and hypothesis ("" if unknown).
        has_tags: the model writes language tags.
    """
    grouped: dict[str, list[tuple[Transcript, str]]] = {}
    for transcript, language, found in transcripts:
        grouped.setdefault(language, []).append((transcript, found))
    return [
        LanguageErrors(
            language=language,
            utterances=len(group),
            errors=SetErrors.of([transcript for transcript, _ in group]),
            tagged=sum(found == language for _, found in group) if has_tags else None,
        )
        for language, group in sorted(grouped.items())
    ]


def language_lines(languages: Sequence[LanguageErrors], choice: MetricChoice) -> list[str]:
    """A table with tabs: language, utterances, metric, its rate, WER, CER, share of right tags."""
    lines = ["language\tutterances\tmetric\trate\tWER\tCER\tlanguage found"]
    for each in languages:
        errors = each.errors
        rates = (errors.headline(choice), errors.words, errors.characters)
        tagged = "" if each.tagged is None else f"{each.tagged / each.utterances:.2%}"
        cells = [each.language or "unknown", str(each.utterances), errors.metric(choice).upper()]
        lines.append("\t".join([*cells, *(f"{rate.rate:.2%}" for rate in rates), tagged]))
    return lines
