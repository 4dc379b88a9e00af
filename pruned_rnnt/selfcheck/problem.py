"""One thing that the check compares, and what it found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

Outputs = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one comparison.

    part: one of `switched_kernels.PARTS`, or another name where nothing can be switched.
    error: the largest error of its worst output, as a fraction of that output's largest value;
        None if it could not run, which is no failure unless `failure` says so.
    tolerance: the largest error that is right.
    failure: what is wrong; empty if all is right.
    note: why something was left out.
    plain_is_right: True if plain torch gives the right result, so that switching helps.
    """

    part: str
    what: str
    error: float | None = None
    tolerance: float = 0.0
    failure: str = ""
    note: str = ""
    plain_is_right: bool = False

    def line(self) -> str:
        """For the terminal."""
        sign = "WRONG" if self.failure else "right" if self.error is not None else "-"
        text = f"  {sign:5s}  {self.what}"
        if self.error is not None:
            text += f": error {self.error:.1e}, at most {self.tolerance:.0e}"
        said = self.failure or self.note
        return f"{text}; {said}" if self.error is not None and said else f"{text} {said}".rstrip()


def guarded(part: str, what: str, compare: Callable[[], Finding]) -> Finding:
    """A finding; an exception is one too, because the other comparisons must go on."""
    try:
        return compare()
    except Exception as error:
        return Finding(part=part, what=what, failure=first_line(error))


def first_line(error: Exception) -> str:
    """The kind of an error and the first line of its message."""
    said = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {said[0][:300]}"
