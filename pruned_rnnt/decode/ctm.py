"""NIST's CTM: one timed word a line, as scoring tools read it."""

from __future__ import annotations

from collections.abc import Iterable


def ctm_line(name: str, word: str, start: float, end: float, confidence: float) -> str:
    """`name channel start duration word confidence`; what has spaces gets underscores for them."""
    name, word = ("_".join(part.split()) for part in (name, word))
    return f"{name} 1 {start:.3f} {end - start:.3f} {word} {confidence:.4f}"


def ctm_text(name: str, items: Iterable[tuple[str, float, float, float]]) -> str:
    """Lines of one recording: items are (word, start, end, confidence) in order of time."""
    return "".join(f"{ctm_line(name, *item)}\n" for item in items)
