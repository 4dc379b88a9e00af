"""Read JSON files that may be damaged, or written by somebody else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path, advice: str = "") -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        advice: what to do about a damaged file, for the error message.

    Raises:
        ValueError: not UTF-8, not JSON, or not an object; the message names the file.
        OSError: the file cannot be read.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise damaged(path, "it is not UTF-8", advice) from error
    except json.JSONDecodeError as error:
        raise damaged(path, f"{error.msg} in line {error.lineno}", advice) from error
    except (ValueError, RecursionError) as error:  # numbers of many digits, many brackets
        raise damaged(path, "it is not plain JSON", advice) from error
    if not isinstance(values, dict):
        raise damaged(path, f"it holds {type(values).__name__}, not names with values", advice)
    return values


def damaged(path: Path, reason: object, advice: str = "") -> ValueError:
    """The error about the contents of a file; a KeyError as `reason` is a missing name."""
    said = f"it has no {reason}" if isinstance(reason, KeyError) else str(reason).splitlines()[0]
    return ValueError(f"{path} is damaged ({said[:200]})" + (f": {advice}" if advice else ""))
