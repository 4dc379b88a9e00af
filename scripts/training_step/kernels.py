"""The kernels of a trace that torch's profiler has written, and the time in which any ran."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_NAME_LENGTH = 100
_NOISE = ("(anonymous namespace)::", "at::native::", "at::cuda::", "std::", "void ")


class Kernel(NamedTuple):
    """Calls and seconds of one kernel in a step."""

    name: str
    calls: float
    seconds: float


def read_trace(path: Path, *, steps: int) -> tuple[float, list[Kernel]]:
    """Seconds of a step in which at least one kernel ran; the kernels, by falling time.

    Args:
        path: Chrome trace with `steps` steps. Copies and fills of memory are no kernels.
    """
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    found = [event for event in events if event.get("cat") == "kernel"]
    busy = union((event["ts"], event["ts"] + event["dur"]) for event in found)
    names: dict[str, list[float]] = {}
    for event in found:
        names.setdefault(event["name"], []).append(event["dur"] / 1e6)
    kernels = [
        Kernel(name, len(seconds) / steps, sum(seconds) / steps) for name, seconds in names.items()
    ]
    return busy / 1e6 / steps, sorted(kernels, key=lambda kernel: -kernel.seconds)


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Total length of the union of intervals (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def short_name(name: str) -> str:
    """A C++ kernel's name without its arguments and common namespaces, at most 100 characters."""
    for noise in _NOISE:
        name = name.replace(noise, "")
    if name.endswith(")"):
        depth = 0
        for place in range(len(name) - 1, -1, -1):
            depth += {")": 1, "(": -1}.get(name[place], 0)
            if depth == 0:
                # Nothing but arguments is in the last parentheses.
                name = name[:place] or name
                break
    return name if len(name) <= _NAME_LENGTH else name[: _NAME_LENGTH - 3] + "..."
