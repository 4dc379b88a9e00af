"""Read JSON files that may be damaged, or written by somebody else."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


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


def without_nan(value: Any) -> Any:
    """Nested plain values with None for NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {name: without_nan(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def with_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of `without_nan`, those that are not nested, with NaN for None."""
    return {name: math.nan if value is None else value for name, value in values.items()}


def from_json(kind: type[T], values: Any) -> T:
    """A dataclass or NamedTuple from its JSON object, with the values checked; other keys are left.

    Sequences may be tuples, as in an object that a file of torch.save holds.

    The types of its fields may be str, bool, int, float, Any, such classes, and tuples of any
    length, mappings with texts as keys, and any of these or None.

    Raises:
        TypeError: a value is missing or has another type; the message names its key.
    """
    found: T = _checked(kind, values, "")
    return found


def _checked(kind: Any, value: Any, key: str) -> Any:
    arguments = get_args(kind)
    if kind is Any or (kind is float and type(value) is int) or type(value) is kind:
        return value
    if get_origin(kind) in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (kind,) = (each for each in arguments if each is not type(None))
        return _checked(kind, value, key)
    if isinstance(value, (list, tuple)) and get_origin(kind) is tuple:
        return tuple(_checked(arguments[0], item, f"{key}.{n}") for n, item in enumerate(value))
    if isinstance(value, dict):
        if get_origin(kind) is Mapping:
            return {
                name: _checked(arguments[1], item, f"{key}.{name}") for name, item in value.items()
            }
        if is_dataclass(kind) or hasattr(kind, "_fields"):
            return kind(  # TypeError names what is missing
                **{
                    name: _checked(field, value[name], f"{key}.{name}")
                    for name, field in get_type_hints(kind).items()
                    if name in value
                }
            )
    needed = getattr(kind, "__name__", kind)
    raise TypeError(f"{key[1:] or 'it'} is {ascii(value)[:80]}, needs {needed}")
