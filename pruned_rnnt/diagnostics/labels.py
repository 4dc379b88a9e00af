"""Texts in pictures, in any script for which a font is installed; else code points.

matplotlib draws a box for a character that its font lacks, even if another font has it. In an SVG
file, whose texts a browser draws, every character stays as it is.
"""

from __future__ import annotations

import functools
import logging
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

# These fonts are tried first, because they match the style of the default font.
_PREFERRED = ("Noto Sans", "Source Han Sans", "WenQuanYi", "Droid Sans", "IPA", "Nanum")
# Fonts for formulas, and one that has a box for every character.
_NO_TEXT = ("Last Resort", "STIX", "cm")


_MOST_CHARACTERS = 60
_DOTTED_CIRCLE = "\u25cc"
_by_browser: ContextVar[bool] = ContextVar("_by_browser", default=False)


@contextmanager
def drawn_by_browser() -> Iterator[None]:
    """For figures that are saved as SVG with texts: `printable` writes no code points."""
    token = _by_browser.set(True)
    try:
        yield
    finally:
        _by_browser.reset(token)


def printable(text: str, most: int = _MOST_CHARACTERS) -> str:
    """Prepare a text for a picture.

    Texts of more than `most` characters are cut. Word-start marks of tokens become underscores, a
    mark that begins a text gets a dotted circle to stand on, control characters are left out, and
    `$` does not start a formula. Characters that no installed font has become code points; a
    warning names the first one.
    """
    if len(text) > most:
        text = text[: most - 1] + "\u2026"
    text = text.replace("\u2581", "_")
    text = "".join(c for c in text if c == "\n" or unicodedata.category(c) not in ("Cc", "Cs"))
    place = len(text) - len(text.lstrip("_"))
    if is_mark(text[place : place + 1]):
        text = text[:place] + _DOTTED_CIRCLE + text[place:]
    if not _by_browser.get():
        text = _with_code_points(text)
    return text.replace("$", r"\$")


def isolated(text: str) -> str:
    """`text` so that its order does not depend on the text around it, if it has letters of a script
    that runs from right to left."""
    if any(unicodedata.bidirectional(character) in ("R", "AL") for character in text):
        return f"\u2068{text}\u2069"
    return text


def columns(text: str) -> int:
    """The width of a text: two for each Chinese, Japanese or Korean character, none for marks."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(is_mark(character) for character in text)


def is_mark(character: str) -> bool:
    """True for combining marks, False for ""."""
    return bool(character) and unicodedata.category(character)[0] == "M"


def _with_code_points(text: str) -> str:
    shown = ""
    is_code = False
    for character in text:
        was_code, is_code = is_code, _family_with(character) is None
        if is_code:
            _warn_once(character)
            character = f"U+{ord(character):04X}"
        # Spaces separate code points from adjacent characters.
        if (is_code or was_code) and shown[-1:].strip(" _\n") and not character.isspace():
            shown += " "
        shown += character
    return shown


def use_fonts_of_labels(figure: Figure) -> None:
    """Set the fonts that `printable` has found so far for all texts of a figure."""
    from matplotlib import rcParams
    from matplotlib.text import Text

    if _families:
        for text in figure.findobj(Text):
            text.set_fontfamily([*rcParams["font.family"], *_families])


# Font families for characters that the default font lacks, in the order of first use.
_families: list[str] = []
# Characters that no installed font has.
_missing: set[str] = set()


@functools.lru_cache(maxsize=100_000)
def _family_with(character: str) -> str | None:
    """A font family with the character: "" for the default font; None if there is none."""
    from matplotlib.font_manager import FontProperties, findfont

    code = ord(character)
    if (
        code < 0x80
        or not character.isprintable()
        or code in _characters(findfont(FontProperties()))
    ):
        return ""
    for family, path in _fonts():
        if code in _characters(path):
            if family not in _families:
                _families.append(family)
            return family
    return None


@functools.cache
def _fonts() -> list[tuple[str, str]]:
    """Families and files of the installed fonts, preferred ones first."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    known = {entry.fname for entry in fontManager.ttflist}
    # matplotlib's cached list may lack fonts that were installed later.
    for path in findSystemFonts():
        if path not in known:
            try:
                fontManager.addfont(path)
            except Exception as error:  # broken fonts raise many kinds of errors
                logger.debug("cannot read font %s: %s", path, error)
    fonts = {entry.name: entry.fname for entry in reversed(fontManager.ttflist)}
    texts = [font for font in sorted(fonts.items()) if not font[0].startswith(_NO_TEXT)]
    return sorted(texts, key=lambda font: not font[0].startswith(_PREFERRED))


@functools.cache
def _characters(path: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(path).get_charmap())
    except Exception as error:  # the font was removed or is broken
        logger.debug("cannot read font %s: %s", path, error)
        return frozenset()


def _warn_once(character: str) -> None:
    if not _missing:
        logger.warning(
            "no installed font has U+%04X: pictures show code points instead of such characters. "
            "For Chinese, Japanese and Korean, install the package fonts-noto-cjk (Debian, "
            "Ubuntu) or google-noto-sans-cjk-fonts (Fedora)",
            ord(character),
        )
    _missing.add(character)
