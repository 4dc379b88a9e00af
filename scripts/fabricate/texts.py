"""Texts of made-up words, in the script and spelling of a corpus."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

_CHINESE_FIRST = 0x4E00
# Frequencies of words fall as 1 / (rank + 2.7).
_RANK_OFFSET = 2.7


@dataclass(frozen=True, kw_only=True)
class Language:
    """words: the vocabulary, most frequent first. joint: between words.

    sentences: sentences begin with a capital letter, end with a full stop, and may have commas.
    """

    words: Sequence[str]
    joint: str = " "
    sentences: bool = False
    _cumulative: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        weights = 1 / (np.arange(len(self.words)) + _RANK_OFFSET)
        object.__setattr__(self, "_cumulative", np.cumsum(weights / weights.sum()))

    def draw(self, characters: int, rng: np.random.Generator) -> str:
        """A text of at least one word, that ends when it has `characters` characters or more."""
        drawn: list[str] = []
        length = 0
        while length < characters:
            index = int(np.searchsorted(self._cumulative, rng.random(), side="right"))
            drawn.append(self.words[min(index, len(self.words) - 1)])
            length += len(drawn[-1]) + len(self.joint)
        if not self.sentences:
            return self.joint.join(drawn)
        if len(drawn) > 4:
            drawn[2] += ","
        text = self.joint.join(drawn)
        return f"{text[0].upper()}{text[1:]}."


def latin_words(count: int, *, vowels: str, consonants: str, seed: int = 0) -> list[str]:
    """Different words of one to four syllables, short ones first."""
    rng = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        syllables = 1 + min(3, len(found) * 4 // count)
        word = "".join(rng.choice(consonants) + rng.choice(vowels) for _ in range(syllables))
        found[word + rng.choice(["", *consonants])] = None
    return list(found)


def chinese_characters(count: int) -> list[str]:
    """Different characters, in an order of their own."""
    order = np.random.default_rng(0).permutation(count)
    return [chr(_CHINESE_FIRST + int(index)) for index in order]


def english() -> Language:
    """Words in capital letters, without punctuation, as LibriSpeech writes them."""
    words = latin_words(4000, vowels="AEIOU", consonants="BCDFGHKLMNPRSTVWYZ")
    return Language(words=words)


def german() -> Language:
    """Sentences with capital letters, umlauts and punctuation, as in Common Voice."""
    words = latin_words(4000, vowels="aeiou\u00e4\u00f6\u00fc", consonants="bcdfghklmnprstw\u00dfz")
    return Language(words=words, sentences=True)


def mandarin() -> Language:
    """Words of one or two characters with spaces between them, as in AISHELL's transcript."""
    single = chinese_characters(4000)
    pairs = [first + second for first, second in zip(single, single[7:], strict=False)]
    words = [word for both in zip(pairs, single, strict=False) for word in both]
    return Language(words=words)
