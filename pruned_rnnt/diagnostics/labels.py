"""Texts in pictures: any script that some installed font has, and code points for the others.

matplotlib draws a box for a character that the font lacks, also where another font has it.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

# Tried before all other fonts: those which look like the letters around them.
_PREFERRED = ("Noto Sans", "Source Han Sans", "WenQuanYi", "Droid Sans", "IPA", "Nanum")
# Fonts of formulas, and one that has a box for every character there is.
_NO_TEXT = ("Last Resort", "STIX", "cm")


def printable(text: str) -> str:
    """A text as it should stand in a picture.

    Word boundaries of tokens are light and nothing is a formula. A character that no installed font
    has becomes its code point; the first one is named in a warning.
    """
    shown = ""
    is_code = False
    for character in text.replace("\u2581", "_"):
        was_code, is_code = is_code, _family_with(character) is None
        if is_code:
            _warn_once(character)
            character = f"U+{ord(character):04X}"
        # Code points stand apart from what is beside them.
        if (is_code or was_code) and shown[-1:].strip(" _\n") and not character.isspace():
            shown += " "
        shown += character
    return shown.replace("$", r"\$")


def use_fonts_of_labels(figure: Figure) -> None:
    """Gives all texts of a figure the fonts that `printable` has found so far."""
    from matplotlib import rcParams
    from matplotlib.text import Text

    if _found:
        for text in figure.findobj(Text):
            text.set_fontfamily([*rcParams["font.family"], *_found])


# Families that have what the usual font lacks, in the order in which they were needed.
_found: list[str] = []
# Characters that no font has.
_missing: set[str] = set()


@functools.lru_cache(maxsize=100_000)
def _family_with(character: str) -> str | None:
    """The family of a font with the character: "" for the usual one; None where there is none."""
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
            if family not in _found:
                _found.append(family)
            return family
    return None


@functools.cache
def _fonts() -> list[tuple[str, str]]:
    """Family and file of the installed fonts, those first which are preferred."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    known = {entry.fname for entry in fontManager.ttflist}
    # matplotlib's own list is of the day when it was made.
    for path in findSystemFonts():
        if path not in known:
            try:
                fontManager.addfont(path)
            except Exception as error:  # whatever a broken font makes of it
                logger.debug("font %s cannot be read: %s", path, error)
    fonts = {entry.name: entry.fname for entry in reversed(fontManager.ttflist)}
    texts = [font for font in sorted(fonts.items()) if not font[0].startswith(_NO_TEXT)]
    return sorted(texts, key=lambda font: not font[0].startswith(_PREFERRED))


@functools.cache
def _characters(path: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(path).get_charmap())
    except Exception as error:  # a font that was removed or is broken
        logger.debug("font %s cannot be read: %s", path, error)
        return frozenset()


def _warn_once(character: str) -> None:
    if not _missing:
        logger.warning(
            "no installed font has U+%04X: pictures show such characters by their code points; the "
            "package fonts-noto-cjk (Debian, Ubuntu) or google-noto-sans-cjk-fonts (Fedora) has "
            "Chinese, Japanese and Korean",
            ord(character),
        )
    _missing.add(character)
