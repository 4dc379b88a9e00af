"""Normalises transcripts to the spelling that the model should produce."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Literal

# Apostrophes inside words belong to the spelling ("don't"); the curly one becomes straight.
_APOSTROPHES = {"'": "'", "\u2019": "'"}


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """How to normalise a text; Unicode always becomes NFC, and white space single spaces.

    case: case of the letters. punctuation: "remove" keeps apostrophes inside words.
    spaces: "remove" is for languages that are written without spaces.
    """

    case: Literal["keep", "lower", "upper"] = "keep"
    punctuation: Literal["keep", "remove"] = "keep"
    spaces: Literal["keep", "remove"] = "keep"


def normalise_text(text: str, config: TextConfig) -> str:
    """The normalised text; may be empty."""
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
    """True for characters that `punctuation="remove"` removes everywhere (not apostrophes)."""
    return character not in _APOSTROPHES and unicodedata.category(character)[0] in "PSC"
