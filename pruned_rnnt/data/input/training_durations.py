"""The duration of a model's training utterances, stored in RUN/utterances.json.

Long audio is transcribed in segments of about this length, because a model works poorly on audio
that is far longer than its training utterances.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pruned_rnnt.run.folder import RunFolder
from pruned_rnnt.system.json_file import damaged, read_json

_KEY = "usual_longest_seconds"
_PERCENTILE = 0.99


def p99_duration(durations: Sequence[float]) -> float:
    """99th percentile of the durations, so that a few very long utterances are ignored."""
    return float(sorted(durations)[int(_PERCENTILE * (len(durations) - 1))])


def save_p99_duration(folder: Path, seconds: float) -> None:
    """Writes `folder`/utterances.json."""
    text = json.dumps({_KEY: round(seconds, 3)}) + "\n"
    RunFolder(folder).durations.write_text(text, encoding="utf-8")


def read_p99_duration(folder: Path) -> float | None:
    """The saved duration in seconds; None if `folder` has none (imported models).

    Raises:
        ValueError: the file is damaged.
    """
    path = RunFolder(folder).durations
    if not path.is_file():
        return None
    advice = f"it needs {{{_KEY!r}: SECONDS}}; correct or remove it"
    seconds = read_json(path, advice).get(_KEY)
    if isinstance(seconds, int | float) and 0 < seconds < float("inf"):
        return float(seconds)
    raise damaged(path, f"{_KEY} is {seconds!r}", advice)
