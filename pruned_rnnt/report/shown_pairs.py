"""The alignment of an utterance as the page shows it: in words, or in characters with their marks.

A set that is scored in characters may have utterances in scripts whose letters join; these are
shown in words. In scripts without spaces, marks stay with the character that they belong to.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pruned_rnnt.data.tokens.scripts import written_without_spaces
from pruned_rnnt.decode.scoring.error_statistics import WordPair, align_words
from pruned_rnnt.report.scored_set import ScoredUtterance

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
