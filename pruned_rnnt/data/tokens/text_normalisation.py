"""Normalises transcripts to the spelling that the model should produce.

docs/texts.md has the rules with examples.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from pruned_rnnt.data.tokens.normal_form import normal_form
from pruned_rnnt.data.tokens.punctuation import without_punctuation

_MOST_CHARACTERS = 35
# In these languages i with and without a dot are two letters, in both cases.
_DOTTED_I = ("az", "crh", "gag", "tr")
# Has no upper case in ordinary writing; `str.upper` would change it to letters that few fonts have.
_GEORGIAN = re.compile("[\u10d0-\u10ff]+")


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """How to normalise a text; in any case it gets the normal form (see `normal_form`).

    case: case of the letters. punctuation: "remove" keeps the marks that belong to a word.
    spaces: "remove" is for languages that are written without spaces.
    language: code of the language, for example "tr", whose rules for case and apostrophes apply.
        "" if it is unknown.
    """

    case: Literal["keep", "lower", "upper"] = "keep"
    punctuation: Literal["keep", "remove"] = "keep"
    spaces: Literal["keep", "remove"] = "keep"
    language: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "language", language_code(self.language))

    def in_language(self, language: str) -> TextConfig:
        """These rules for a text whose language is known; "" changes nothing."""
        return replace(self, language=language) if language else self


def language_code(name: str) -> str:
    """A language code, or another name of a language, in lower case and with hyphens.

    Raises:
        ValueError: it is longer than 35 characters, or has one of < | >.
    """
    code = "-".join(normal_form(name).lower().replace("_", " ").split())
    if len(code) > _MOST_CHARACTERS or any(mark in code for mark in "<|>"):
        raise ValueError(f"language must be a code like tr or zh-CN, got {name[:100]!r}")
    return code


def normalise_text(text: str, config: TextConfig) -> str:
    """The normalised text; may be empty."""
    language = config.language.partition("-")[0]
    text = normal_form(text)
    if config.case == "lower":
        text = _lower(text, language)
    elif config.case == "upper":
        text = _upper(text, language)
    if config.punctuation == "remove":
        text = without_punctuation(text, language)
    text = normal_form(text)
    return text.replace(" ", "") if config.spaces == "remove" else text


def _lower(text: str, language: str) -> str:
    if language in _DOTTED_I:
        text = text.replace("I", "\u0131")
    # `str.lower` would write the dot of this letter as a mark of its own.
    return text.replace("\u0130", "i").lower()


def _upper(text: str, language: str) -> str:
    if language in _DOTTED_I:
        text = text.replace("i", "\u0130")
    parts = _GEORGIAN.split(text)
    georgian = [*_GEORGIAN.findall(text), ""]
    return "".join(part.upper() + kept for part, kept in zip(parts, georgian, strict=True))
