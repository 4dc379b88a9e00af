"""The normal form of a text: one spelling for texts that look the same.

Everything that the package compares or learns is in this form: training texts, references, texts
to align, hotwords and hypotheses. docs/texts.md has the rules with examples.
"""

from __future__ import annotations

import re
import unicodedata

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


def is_word_character(character: str) -> bool:
    """True for letters, marks, digits and joiners, of which words consist; False for ""."""
    return bool(character) and (character in JOINERS or unicodedata.category(character)[0] in "LMN")


def _joiner_in_a_word(found: re.Match[str]) -> str:
    """One joiner if it stands inside a word, else nothing."""
    text, base = found.string, found.start() - 1
    while base >= 0 and unicodedata.category(text[base])[0] == "M":
        base -= 1
    starts = base >= 0 and unicodedata.category(text[base])[0] in "LN"
    after = text[found.end() : found.end() + 1]
    return found[0][0] if starts and is_word_character(after) else ""
