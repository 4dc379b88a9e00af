"""NIST's CTM format, which scoring tools read: one word with its times per line."""

from __future__ import annotations

from collections.abc import Iterable


def ctm_line(name: str, word: str, start: float, end: float, confidence: float) -> str:
    """`name channel start duration word confidence`; spaces in name and word become underscores."""
    name, word = ("_".join(part.split()) for part in (name, word))
    return f"{name} 1 {start:.3f} {end - start:.3f} {word} {confidence:.4f}"


def ctm_text(name: str, items: Iterable[tuple[str, float, float, float]]) -> str:
    """The lines of one recording; items are (word, start, end, confidence) in order of time."""
    return "".join(f"{ctm_line(name, *item)}\n" for item in items)
