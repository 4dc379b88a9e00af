"""Praat's TextGrid, long text format: tiers of intervals that cover the whole time."""

from __future__ import annotations

from collections.abc import Sequence

# Text, start and end in seconds.
Interval = tuple[str, float, float]


def textgrid(tiers: Sequence[tuple[str, Sequence[Interval]]], seconds: float) -> str:
    """The contents of a TextGrid file.

    Args:
        tiers: name and intervals of each tier, in order of time and not overlapping; gaps become
            empty intervals, which the format requires.
        seconds: length of the audio.
    """
    ends = [interval[2] for _, intervals in tiers for interval in intervals]
    total = max([seconds, *ends])
    lines = [
        'File type = "ooTextFile"',
        'Object class = "TextGrid"',
        "",
        "xmin = 0",
        f"xmax = {_number(total)}",
        "tiers? <exists>",
        f"size = {len(tiers)}",
        "item []:",
    ]
    for number, (name, intervals) in enumerate(tiers, start=1):
        filled = _without_gaps(intervals, total)
        lines += [
            f"    item [{number}]:",
            '        class = "IntervalTier"',
            f"        name = {_quoted(name)}",
            "        xmin = 0",
            f"        xmax = {_number(total)}",
            f"        intervals: size = {len(filled)}",
        ]
        for index, (text, start, end) in enumerate(filled, start=1):
            lines += [
                f"        intervals [{index}]:",
                f"            xmin = {_number(start)}",
                f"            xmax = {_number(end)}",
                f"            text = {_quoted(text)}",
            ]
    return "\n".join(lines) + "\n"


def _without_gaps(intervals: Sequence[Interval], total: float) -> list[Interval]:
    filled: list[Interval] = []
    time = 0.0
    for text, start, end in intervals:
        if start > time:
            filled.append(("", time, start))
        filled.append((text, start, end))
        time = end
    if time < total or not filled:
        filled.append(("", time, total))
    return filled


def _number(seconds: float) -> str:
    return f"{seconds:.4f}".rstrip("0").rstrip(".")


def _quoted(text: str) -> str:
    doubled = text.replace('"', '""')
    return f'"{doubled}"'
