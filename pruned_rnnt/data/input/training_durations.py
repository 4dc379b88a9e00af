"""The duration of a model's training utterances, stored in RUN/utterances.json.

Long audio is transcribed in segments of about this length, because a model works poorly on audio
that is far longer than its training utterances.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

_NAME = "utterances.json"
_KEY = "usual_longest_seconds"
_PERCENTILE = 0.99


def p99_duration(durations: Sequence[float]) -> float:
    """99th percentile of the durations, so that a few very long utterances are ignored."""
    return float(sorted(durations)[int(_PERCENTILE * (len(durations) - 1))])


def save_p99_duration(folder: Path, seconds: float) -> None:
    """Writes `folder`/utterances.json."""
    text = json.dumps({_KEY: round(seconds, 3)}) + "\n"
    (folder / _NAME).write_text(text, encoding="utf-8")


def read_p99_duration(folder: Path) -> float | None:
    """The saved duration in seconds; None if `folder` has none (imported models).

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
            f"{path} must contain {{{_KEY!r}: NUMBER}}, got {text[:80]!r}; correct or remove it"
        ) from error
