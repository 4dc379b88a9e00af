"""Removes punctuation and symbols from texts, but not the marks that are part of a word."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

from pruned_rnnt.data.tokens.normal_form import is_word_character

# What people type for an apostrophe; inside words it becomes the straight one.
_APOSTROPHES = "'\u2019\u2018\u201b`\u00b4\u2032\uff07\u055a"
# Letters, except in Uzbek, where people type any of these and any of those above.
_APOSTROPHE_LETTERS = "\u02bb\u02bc"
_GERESH, _GERSHAYIM = "\u05f3", "\u05f4"
# Between two Hebrew letters these are a gershayim.
_DOUBLE_QUOTES = '"\u201d\u201c\u201e\u05f4'
# Between two digits.
_IN_NUMBERS = ".,:/\u066b\u066c"
# Catalan's l\u00b7l, and what people type for it; Occitan has the point between other letters too.
_RAISED_POINT = "\u00b7"
_POINTS = f"{_RAISED_POINT}\u2027\u2022\u2219."
# Spelling, although Unicode counts them among punctuation and symbols: Devanagari's sign of
# abbreviation, the Tibetan points between syllables, two words of Sindhi.
_SPELLING = "\u0970\u0f0b\u0f0c\u06fd\u06fe"
# Armenian's marks of intonation stand on a vowel; the Arabic one lengthens the line.
_ON_LETTERS = "\u055b\u055c\u055e\u055f\u0640"


def is_punctuation(character: str) -> bool:
    """True for punctuation and symbols, removed everywhere or not; False for apostrophes."""
    return (
        character not in f"{_APOSTROPHES}{_SPELLING}" and unicodedata.category(character)[0] in "PS"
    )


def without_punctuation(text: str, language: str = "") -> str:
    """`text` with punctuation and symbols removed; may have spaces at the ends or several in a row.

    text: in normal form. language: its code, without a region; "" if unknown.
    """
    kept = []
    # The last character that is no mark, and whether it was kept.
    base, is_base_kept = "", True
    in_quotes = False
    for index, character in enumerate(text):
        category = unicodedata.category(character)
        if category[0] == "M":
            # Marks stay with their letter; those that enclose a sign are symbols.
            kept.append(character if is_base_kept and category != "Me" else "")
            continue
        place = _Place(text[index - 1 : index], base, text[index + 1 : index + 2], language)
        if character in f"{_APOSTROPHES}{_GERESH}" or (
            character in _APOSTROPHE_LETTERS and language == "uz"
        ):
            ends = place.after_word and not place.before_word
            new = " " if in_quotes and ends and character != _GERESH else _apostrophe(place)
            in_quotes = (place.before_word and not place.after_word) or (in_quotes and not ends)
        elif character in _ON_LETTERS:
            new = ""
        elif is_word_character(character) or character.isspace() or character in _SPELLING:
            new = character
        else:
            new = _mark(character, place)
        kept.append(new)
        base, is_base_kept = character, bool(new.strip())
    return "".join(kept)


@dataclass(frozen=True)
class _Place:
    """Where a character stands: after `before`, whose letter is `base`, and before `after`."""

    before: str
    base: str
    after: str
    language: str

    @property
    def after_word(self) -> bool:
        return is_word_character(self.before)

    @property
    def before_word(self) -> bool:
        return is_word_character(self.after)

    @property
    def inside_word(self) -> bool:
        return self.after_word and self.before_word


def _apostrophe(place: _Place) -> str:
    if place.language == "uz" and place.after_word and place.base in "oOgG":
        return "\u02bb"
    if place.after_word and _is_hebrew(place.base):
        return _GERESH
    if not place.inside_word:
        return " "
    return "\u02bc" if place.language == "uz" else "'"


def _mark(character: str, place: _Place) -> str:
    """What a mark or symbol becomes: a spelling of it, nothing, or a space."""
    if not place.inside_word:
        return " "
    letters = place.base, place.after
    if character in _IN_NUMBERS and all(letter.isdecimal() for letter in letters):
        return character
    if character in _DOUBLE_QUOTES and all(map(_is_hebrew, letters)):
        return _GERSHAYIM
    if character == _RAISED_POINT and all(map(_is_latin, letters)):
        return character
    if place.language == "ca" and character in _POINTS and letters in (("l", "l"), ("L", "L")):
        return _RAISED_POINT
    # Quotation marks and brackets enclose words or parts of them, as in "word(s)".
    encloses = character == '"' or unicodedata.category(character) in ("Ps", "Pe", "Pi", "Pf")
    return "" if encloses else " "


def _is_hebrew(character: str) -> bool:
    return "\u05d0" <= character <= "\u05ea"


def _is_latin(character: str) -> bool:
    return unicodedata.name(character, "").startswith("LATIN")
