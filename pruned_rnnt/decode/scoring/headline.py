"""Errors in words and in characters, and which of them describes a set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pruned_rnnt.data.tokens.scripts import written_without_spaces
from pruned_rnnt.decode.scoring.wer import ErrorCounts, Transcript, count_errors

Metric = Literal["wer", "cer"]
MetricChoice = Literal["auto", "wer", "cer"]
# With a larger share of references without spaces, a WER would mostly count whole sentences.
_MOST_WITHOUT_SPACES = 0.1


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
