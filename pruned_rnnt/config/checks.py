"""Range checks of settings, for the constructors of configuration classes, and removed settings."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

# Which values a setting of a type takes (numbers of numpy, too), and what messages call them.
_KINDS: dict[Any, tuple[type, str]] = {
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str, "a text"),
}


class Removed(NamedTuple):
    """A setting of earlier versions, or values of a setting, that no longer exist.

    A configuration class lists them in its class variable `REMOVED`, by the name of the setting.

    advice: what to do; ends the error message.
    unused: the value with which a removed setting had no effect: files may still contain it.
    replacements: for each removed value of a setting that still exists, the value that takes its
        place when a saved run is read.
    """

    advice: str
    unused: Any = None
    replacements: Mapping[str, str] = {}


def check_at_least(section: str, config: object, **least: float) -> None:
    """Raise an error for settings below their lower bounds.

    Args:
        section: their section in configuration files, e.g. `model.encoder`, for the message.
        config: object with the settings as attributes; every entry of a tuple is checked, and
            None passes where its type allows it.
        least: the smallest value of each setting.

    Raises:
        ValueError: a setting is too small, NaN or no number; the message names key, value and
            bound.
    """
    for name, bound in least.items():
        value = getattr(config, name)
        values = value if isinstance(value, tuple | list) else (value,)
        if value is None and type(None) in get_args(get_type_hints(type(config)).get(name)):
            continue
        if not all(isinstance(entry, numbers.Real) and entry >= bound for entry in values):  # type: ignore[operator]
            shown = list(value) if isinstance(value, tuple) else value
            raise ValueError(f"{section}.{name} is {shown}, needs at least {bound}")


def check_types(section: str, config: object) -> None:
    """Raise an error for a setting of the wrong type, or not one of its choices (`Literal`).

    Files and overrides are checked when they are read; Python programs have only this check.

    Raises:
        ValueError: the message names key, value and what it needs.
    """
    for name, kind in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if needs := _unmet(kind, value):
            raise ValueError(f"{section}.{name} is {value!r}, needs {needs}")


def _unmet(kind: Any, value: Any) -> str:
    """What a value of this type must be; empty if `value` is one."""
    entries = get_args(kind)
    if get_origin(kind) is Literal:
        return "" if value in entries else f"one of {', '.join(map(str, entries))}"
    if get_origin(kind) is tuple:
        count = "" if entries[-1] is Ellipsis else f" of {len(entries)} values"
        if not isinstance(value, tuple | list) or (count and len(value) != len(entries)):
            return f"a list{count}"
        return next(filter(None, (_unmet(entries[0], entry) for entry in value)), "")
    wanted, needs = _KINDS.get(kind, (object, ""))
    return "" if isinstance(value, wanted) else needs


def check_seconds(name: str, value: object, least: float, most: float) -> None:
    """Raise ValueError unless the value is a number in this range."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (is_number and least <= value <= most):  # type: ignore[operator]
        shown = f"{value:g}" if is_number else repr(value)
        needed = f"at least {least:g}" if most == math.inf else f"{least:g} to {most:g}"
        raise ValueError(f"{name} is {shown}; it must be {needed} seconds")


def joined_names(key: str, value: object) -> str:
    """The names of a text such as `dev,test`, or of a list, once each with commas between them.

    Args:
        key: of the setting, for the message.

    Raises:
        ValueError: there is no name, or an empty one; the message names key and value.
    """
    names = value if isinstance(value, list | tuple) else str(value).split(",")
    stripped = [str(name).strip() for name in names]
    if not stripped or not all(stripped):
        raise ValueError(f"{key} is {value!r}, needs names of splits, such as dev or dev,test")
    return ",".join(dict.fromkeys(stripped))


def check_fractions(section: str, config: object, *names: str, below_one: bool = False) -> None:
    """Raise an error for settings outside 0 to 1, or equal to 1 if `below_one`.

    Raises:
        ValueError: a setting is out of range; the message names key, value and range.
    """
    for name in names:
        value = getattr(config, name)
        if not 0 <= value <= 1 or (below_one and value == 1):
            needs = "0 <= x < 1" if below_one else "0 to 1"
            raise ValueError(f"{section}.{name} is {value}, needs {needs}")
