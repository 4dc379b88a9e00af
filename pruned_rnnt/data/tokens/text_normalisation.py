"""The spelling of texts: the normal form of all of them, and what a corpus may ask for on top.

Everything that the package compares or learns is in normal form, one spelling for texts that look
the same: training texts, references, texts to align, hotwords and hypotheses. Transcripts may also
lose their case, their spaces, and punctuation and symbols, except for the marks that are part of a
word. Some scripts are written without spaces. docs/texts.md has the rules with examples.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace
from typing import Literal

# Zero-width non-joiner and joiner, which are part of the spelling inside words (Persian, Hindi).
JOINERS = "\u200c\u200d"
# Characters without a glyph, which neither a reader nor a model can tell from nothing: control
# characters that are no white space, single surrogates, and Unicode's default-ignorable code
# points except joiners and Mongolian selectors. SentencePiece reserves U+2585.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u200b\u200e\u200f"
    "\u202a-\u202e\u2060-\u206f\u2585\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]+"
)
_JOINED = re.compile(f"[{JOINERS}]+")
# SentencePiece writes a space as this character.
_SPACE_SYMBOL = "\u2581"
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
# Of the code of a language.
_LONGEST_CODE = 35
# In these languages i with and without a dot are two letters, in both cases.
_DOTTED_I = ("az", "crh", "gag", "tr")
# Has no upper case in ordinary writing; `str.upper` would change it to letters that few fonts have.
_GEORGIAN = re.compile("[\u10d0-\u10ff]+")
# Thai, Lao, Tibetan, Burmese, Khmer, Tai Le, New Tai Lue, Tai Tham, Balinese, Javanese; kana with
# Japanese marks of repetition; Han.
NO_SPACES = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf\u1b00-\u1b7f\ua980-\ua9ff"
    "\uaa60-\uaa7f\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
)
_OF_NO_SPACES = re.compile(f"[{NO_SPACES}]")
_LETTER = re.compile(r"\w")


def normal_form(text: str) -> str:
    """`text` in Unicode's NFC, with single spaces and without invisible characters.

    Joiners stay inside words. The normal form of a normal form is the same text.
    """
    if not text.isascii():
        text = _INVISIBLE.sub("", text.replace(_SPACE_SYMBOL, " "))
        if not unicodedata.is_normalized("NFC", text):
            text = unicodedata.normalize("NFC", text)
        if any(joiner in text for joiner in JOINERS):
            text = unicodedata.normalize("NFC", _JOINED.sub(_joiner_in_a_word, text))
    elif not text.isprintable():
        text = _INVISIBLE.sub("", text)
    return " ".join(text.split())


def joins_the_character_before(character: str) -> bool:
    """True for what the normal form may write as one character with the one before: marks, and
    Korean vowels and final consonants; False for ""."""
    is_mark = bool(character) and unicodedata.category(character)[0] == "M"
    return is_mark or "\u1161" <= character <= "\u11c2"


def _is_word_character(character: str) -> bool:
    """True for letters, marks, digits and joiners, of which words consist; False for ""."""
    return bool(character) and (character in JOINERS or unicodedata.category(character)[0] in "LMN")


def _joiner_in_a_word(found: re.Match[str]) -> str:
    """One joiner if it stands inside a word, else nothing."""
    text, base = found.string, found.start() - 1
    while base >= 0 and unicodedata.category(text[base])[0] == "M":
        base -= 1
    starts = base >= 0 and unicodedata.category(text[base])[0] in "LN"
    after = text[found.end() : found.end() + 1]
    return found[0][0] if starts and _is_word_character(after) else ""


def is_punctuation(character: str) -> bool:
    """True for punctuation and symbols, removed everywhere or not; False for apostrophes."""
    return (
        character not in f"{_APOSTROPHES}{_SPELLING}" and unicodedata.category(character)[0] in "PS"
    )


def _without_punctuation(text: str, language: str = "") -> str:
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
        elif _is_word_character(character) or character.isspace() or character in _SPELLING:
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
        return _is_word_character(self.before)

    @property
    def before_word(self) -> bool:
        return _is_word_character(self.after)

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
    # Empty where nothing but marks stands before: they have no letter.
    return bool(character) and unicodedata.name(character, "").startswith("LATIN")


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
    if len(code) > _LONGEST_CODE or any(mark in code for mark in "<|>"):
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
        text = _without_punctuation(text, language)
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


def written_without_spaces(text: str) -> bool:
    """True if most letters of a text belong to a script without spaces between words.

    Words are then not known from the text, and errors are counted in characters.
    """
    without = len(_OF_NO_SPACES.findall(text))
    others = len(_LETTER.findall(_OF_NO_SPACES.sub("", text)))
    return without > others
