"""How long the utterances are that a model learned from: RUN/utterances.json.

Longer audio is best heard in parts of that length: a model says little about what is far longer
than what it was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

_NAME = "utterances.json"
_KEY = "usual_longest_seconds"
_SHARE = 0.99


def usual_longest(durations: Sequence[float]) -> float:
    """What 99% of durations do not exceed: some long ones among many do not make a habit."""
    return float(sorted(durations)[int(_SHARE * (len(durations) - 1))])


def save_usual_longest(folder: Path, seconds: float) -> None:
    """Write `folder`/utterances.json."""
    text = json.dumps({_KEY: round(seconds, 3)}) + "\n"
    (folder / _NAME).write_text(text, encoding="utf-8")


def read_usual_longest(folder: Path) -> float | None:
    """What was saved in `folder`; None where nothing was (imported models).

    Raises:
        ValueError: the file is damaged.
    """
    path = folder / _NAME
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return float(json.loads(text)[_KEY])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is {text[:80]!r}; it must be {{{_KEY!r}: a number}}, or not be there"
        ) from error
