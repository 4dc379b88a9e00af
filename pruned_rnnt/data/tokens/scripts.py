"""Scripts that are written without spaces between words."""

from __future__ import annotations

import re

# Thai, Lao, Tibetan, Burmese, Khmer, Tai Le, New Tai Lue, Tai Tham, Balinese, Javanese; kana with
# Japanese marks of repetition; Han.
NO_SPACES = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf\u1b00-\u1b7f\ua980-\ua9ff"
    "\uaa60-\uaa7f\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
)
_WITHOUT = re.compile(f"[{NO_SPACES}]")
_CHARACTER = re.compile(r"\w")


def written_without_spaces(text: str) -> bool:
    """True if most letters of a text belong to a script without spaces between words.

    Words are then not known from the text, and errors are counted in characters.
    """
    without = len(_WITHOUT.findall(text))
    others = len(_CHARACTER.findall(_WITHOUT.sub("", text)))
    return without > others
