"""Which utterance ids can be used.

Ids appear in result files, a line each, and on terminals. A line break in one would write lines of
its own there.
"""

from __future__ import annotations

import unicodedata
from typing import Any

# Control characters, surrogates, separators of lines and paragraphs.
_REFUSED = {"Cc", "Cs", "Zl", "Zp"}
# They change the direction of the text that follows.
_DIRECTIONS = {
    *("\u061c", "\u200e", "\u200f"),
    *(chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))),
}


def id_fault(name: Any) -> str:
    """Why `name` cannot be the id of an utterance; empty if it can."""
    if not isinstance(name, str) or not name:
        return "is not a text"
    if not name.isascii() or not name.isprintable():
        for character in name:
            if unicodedata.category(character) in _REFUSED or character in _DIRECTIONS:
                return f"contains the control character {character!a}"
    return ""
