"""The tables of the page as columns, which its script sorts, filters and divides into pages.

Values are short, so that 10,000 utterances load fast: a hypothesis that equals its reference is
left out, and an alignment is one letter for each pair: `=` correct, `s` substituted, `d` deleted,
`i` inserted.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pruned_rnnt.data.tokens.text_normalisation import written_without_spaces
from pruned_rnnt.decode.scoring.error_statistics import (
    ErrorStatistics,
    WordPair,
    align_words,
    lost_runs_of_pairs,
)
from pruned_rnnt.report.comparison import Comparison
from pruned_rnnt.report.scored_set import GroupRate, ScoredSet, ScoredUtterance

# Of a word; longer ones are cut.
_MOST_CHARACTERS = 200


class ShownPairs(NamedTuple):
    """Aligned pairs, and what stands between them in the text: a space or nothing."""

    pairs: Sequence[WordPair]
    separator: str

    @property
    def unit(self) -> str:
        return "word" if self.separator else "character"


def shown_pairs(utterance: ScoredUtterance) -> ShownPairs:
    """The pairs of an utterance for the page."""
    if utterance.sentence is None:
        return ShownPairs(_with_marks(utterance.pairs), "")
    if utterance.transcript is utterance.sentence:
        return ShownPairs(_cut(utterance.pairs), " ")
    reference, hypothesis = utterance.sentence.reference, utterance.sentence.hypothesis
    if not written_without_spaces(" ".join(reference or hypothesis)):
        return ShownPairs(_cut(align_words(reference, hypothesis)), " ")
    return ShownPairs(_with_marks(utterance.pairs), "")


def _cut(pairs: Iterable[WordPair]) -> list[WordPair]:
    return [(_shortened(reference), _shortened(hypothesis)) for reference, hypothesis in pairs]


def _shortened(word: str | None) -> str | None:
    if word is None or len(word) <= _MOST_CHARACTERS:
        return word
    return f"{word[: _MOST_CHARACTERS - 1]}\u2026"


def _with_marks(pairs: Iterable[WordPair]) -> list[WordPair]:
    """Pairs of characters, with those of combining marks joined to the pair before.

    The reference decides, if it has a character.
    """
    joined: list[WordPair] = []
    for reference, hypothesis in pairs:
        if joined and _is_mark(reference or hypothesis or " "):
            before = joined.pop()
            joined.append((_sum(before[0], reference), _sum(before[1], hypothesis)))
        else:
            joined.append((reference, hypothesis))
    return joined


def _is_mark(character: str) -> bool:
    # The Thai and Lao vowels am are drawn over the character before, too.
    return unicodedata.category(character)[0] == "M" or character in "\u0e33\u0eb3"


def _sum(first: str | None, second: str | None) -> str | None:
    return None if first is None and second is None else (first or "") + (second or "")


# How the script shows the values of a column.
ColumnKind = Literal["text", "count", "change", "rate", "seconds", "share", "aligned"]


# Between characters with their marks; no text has it.
_BETWEEN = "\u200b"


@dataclass(frozen=True, kw_only=True)
class Column:
    """values: one for each row; of `aligned`, (reference, hypothesis, alignment) texts."""

    label: str
    kind: ColumnKind
    values: Sequence[Any]
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the page.

    sort: index of the column by which it is sorted first, in descending order if not negative.
    """

    name: str
    caption: str
    columns: Sequence[Column]
    sort: int

    def as_json(self) -> dict[str, Any]:
        """The form that the script reads."""
        return {
            "caption": self.caption,
            "sort": self.sort,
            "columns": [
                {"label": c.label, "kind": c.kind, "hint": c.hint, "values": list(c.values)}
                for c in self.columns
            ],
        }


def utterance_table(scored: ScoredSet, name: str) -> Table:
    """All utterances of a set, by their ids."""
    rows = sorted(scored.utterances, key=lambda utterance: utterance.id)
    columns = [
        Column(label="Utterance", kind="text", values=[row.id for row in rows]),
        Column(label="Errors", kind="count", values=[row.errors.errors for row in rows]),
        Column(label=scored.metric, kind="rate", values=[rate(row.errors.rate) for row in rows]),
        Column(label="Ins", kind="count", values=[row.errors.insertions for row in rows]),
        Column(label="Del", kind="count", values=[row.errors.deletions for row in rows]),
        Column(label="Sub", kind="count", values=[row.errors.substitutions for row in rows]),
    ]
    if any(row.seconds is not None for row in rows):
        seconds = [None if row.seconds is None else round(row.seconds, 2) for row in rows]
        columns.append(Column(label="Seconds", kind="seconds", values=seconds))
    if any(row.speaker for row in rows):
        columns.append(Column(label="Speaker", kind="text", values=[row.speaker for row in rows]))
    texts = [aligned(row) for row in rows]
    columns.append(Column(label="Reference and errors", kind="aligned", values=texts))
    return Table(
        name=name,
        caption=f"All {len(rows):,} utterances of {scored.result.set_name}",
        columns=columns,
        sort=1,
    )


def group_table(groups: Sequence[GroupRate], name: str, kind: str, metric: str) -> Table:
    """Error rates of groups such as speakers."""
    bounds = [(rate(low), rate(high)) for low, high in (group.interval for group in groups)]
    return Table(
        name=name,
        caption=f"{len(groups):,} {kind.lower()}s",
        columns=[
            Column(label=kind, kind="text", values=[group.name for group in groups]),
            Column(label=metric, kind="rate", values=[rate(g.errors.rate) for g in groups]),
            Column(
                label="95% from",
                kind="share",
                values=[low for low, _ in bounds],
                hint="interval by bootstrap over utterances",
            ),
            Column(label="to", kind="share", values=[high for _, high in bounds]),
            Column(label="Utterances", kind="count", values=[g.utterances for g in groups]),
            Column(
                label="Words" if metric == "WER" else "Characters",
                kind="count",
                values=[g.errors.reference_words for g in groups],
            ),
            Column(label="Ins", kind="count", values=[g.errors.insertions for g in groups]),
            Column(label="Del", kind="count", values=[g.errors.deletions for g in groups]),
            Column(label="Sub", kind="count", values=[g.errors.substitutions for g in groups]),
        ],
        sort=1,
    )


def lost_table(scored: ScoredSet, name: str) -> Table | None:
    """Runs of words without text; None without any, or if the errors are those of characters."""
    if scored.unit != "word":
        return None
    runs = [(each, run) for each in scored.utterances for run in lost_runs_of_pairs(each.pairs)]
    if not runs:
        return None
    return Table(
        name=name,
        caption=f"{len(runs):,} runs",
        columns=[
            Column(label="Utterance", kind="text", values=[each.id for each, _ in runs]),
            Column(label="Words", kind="count", values=[len(run) for _, run in runs]),
            Column(label="After words", kind="count", values=[run.start for _, run in runs]),
            Column(
                label="Lost",
                kind="text",
                values=[
                    " ".join(each.transcript.reference[run.start : run.stop]) for each, run in runs
                ],
            ),
        ],
        sort=1,
    )


def word_table(statistics: ErrorStatistics, name: str, unit: str) -> Table:
    """Errors of each word, with the word that most often replaced it."""
    words = sorted(statistics.words)
    counts = [statistics.words[word] for word in words]
    most: dict[str, tuple[int, str]] = {}
    for (reference, found), count in sorted(statistics.substitutions.items()):
        if count > most.get(reference, (0, ""))[0]:
            most[reference] = (count, found)
    replacements = [
        f"{most[word][1]} ({most[word][0]}\N{MULTIPLICATION SIGN})" if word in most else ""
        for word in words
    ]
    return Table(
        name=name,
        caption=f"{len(words):,} different {unit}s",
        columns=[
            Column(label=unit.capitalize(), kind="text", values=words),
            Column(
                label="Errors",
                kind="count",
                values=[c.errors for c in counts],
                hint="substituted, substituting, deleted and inserted",
            ),
            Column(label="In reference", kind="count", values=[c.in_reference for c in counts]),
            Column(
                label="Missed",
                kind="rate",
                values=[
                    rate((c.replaced + c.deleted) / c.in_reference) if c.in_reference else None
                    for c in counts
                ],
                hint="fraction of its occurrences in the reference that were not recognised",
            ),
            Column(label="Deleted", kind="count", values=[c.deleted for c in counts]),
            Column(label="Substituted", kind="count", values=[c.replaced for c in counts]),
            Column(label="Most often replaced by", kind="text", values=replacements),
            Column(
                label="Wrongly recognised",
                kind="count",
                values=[c.replacing + c.inserted for c in counts],
                hint="in place of another, or inserted",
            ),
        ],
        sort=1,
    )


def confusion_table(statistics: ErrorStatistics, name: str) -> Table:
    """All kinds of errors with their numbers."""
    found: Counter[tuple[str, str, str]] = Counter()
    for (reference, hypothesis), count in statistics.substitutions.items():
        found["substitution", reference, hypothesis] = count
    for word, count in statistics.deletions.items():
        found["deletion", word, ""] = count
    for word, count in statistics.insertions.items():
        found["insertion", "", word] = count
    rows = sorted(found)
    return Table(
        name=name,
        caption=f"{len(rows):,} different errors",
        columns=[
            Column(label="Error", kind="text", values=[kind for kind, _, _ in rows]),
            Column(label="Reference", kind="text", values=[word for _, word, _ in rows]),
            Column(label="Recognised", kind="text", values=[word for _, _, word in rows]),
            Column(label="Count", kind="count", values=[found[row] for row in rows]),
        ],
        sort=3,
    )


def change_table(comparison: Comparison, name: str, names: tuple[str, str]) -> Table:
    """Utterances whose numbers of errors differ between two results."""
    rows = [
        (first, second)
        for first, second in comparison.pairs
        if first.errors.errors != second.errors.errors
    ]
    changes = [second.errors.errors - first.errors.errors for first, second in rows]
    return Table(
        name=name,
        caption=f"{len(rows):,} utterances with a different number of errors",
        columns=[
            Column(label="Utterance", kind="text", values=[first.id for first, _ in rows]),
            Column(
                label="Change",
                kind="change",
                values=changes,
                hint=f"errors of {names[1]} minus those of {names[0]}",
            ),
            Column(
                label=names[0],
                kind="aligned",
                values=[aligned(first) for first, _ in rows],
            ),
            Column(
                label=names[1],
                kind="aligned",
                values=[aligned(second) for _, second in rows],
            ),
        ],
        sort=1,
    )


def aligned(utterance: ScoredUtterance) -> list[str]:
    """The text of the reference alone if the hypothesis is correct; else its units and those of
    the hypothesis, the kinds of the pairs, and "" if no space stands between units."""
    pairs, separator = shown_pairs(utterance)
    if not utterance.errors.errors:
        return [separator.join(reference or "" for reference, _ in pairs)]
    between = separator or _BETWEEN
    sides = (
        # Words of result files of other programs may have spaces, by which the script divides.
        between.join(word.replace(" ", "\N{NO-BREAK SPACE}") for word in side if word is not None)
        for side in ((pair[0] for pair in pairs), (pair[1] for pair in pairs))
    )
    letters = "".join(map(pair_letter, pairs))
    return [*sides, letters] if separator else [*sides, letters, separator]


def pair_letter(pair: WordPair) -> str:
    """The kind of an aligned pair as one letter."""
    reference, hypothesis = pair
    if reference == hypothesis:
        return "="
    return "i" if reference is None else "d" if hypothesis is None else "s"


def rate(value: float) -> float | None:
    """Rounded for the page; None, which JSON can hold, for infinite and NaN."""
    return round(value, 5) if abs(value) < float("inf") else None
