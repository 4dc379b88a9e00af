"""Transcripts to what the model shall write: spelling normalised, the same for every corpus."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Literal

# Marks inside words, which belong to their spelling ("don't"); the curly one is made straight.
_APOSTROPHES = {"'": "'", "\u2019": "'"}


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """case: of letters. punctuation: "remove" drops it, apostrophes inside words excepted.

    spaces: "remove" for languages written without them. Unicode is always brought to NFC and
    white space to single spaces.
    """

    case: Literal["keep", "lower", "upper"] = "keep"
    punctuation: Literal["keep", "remove"] = "keep"
    spaces: Literal["keep", "remove"] = "keep"


def normalise_text(text: str, config: TextConfig) -> str:
    """`text` as `config` wants it; may be empty."""
    text = unicodedata.normalize("NFC", text)
    if config.case == "lower":
        text = text.lower()
    elif config.case == "upper":
        text = text.upper()
    if config.punctuation == "remove":
        text = _without_punctuation(text)
    return ("" if config.spaces == "remove" else " ").join(text.split())


def _without_punctuation(text: str) -> str:
    kept = []
    for index, character in enumerate(text):
        if character in _APOSTROPHES:
            inside = text[index - 1 : index].isalpha() and text[index + 1 : index + 2].isalpha()
            kept.append(_APOSTROPHES[character] if inside else " ")
        else:
            kept.append(" " if is_punctuation(character) else character)
    return "".join(kept)


def is_punctuation(character: str) -> bool:
    """Whether `punctuation="remove"` drops it everywhere: no letter, mark, digit or apostrophe."""
    return character not in _APOSTROPHES and unicodedata.category(character)[0] in "PSC"
