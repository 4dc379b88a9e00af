"""Keys of nested configuration values, and explanations of keys and values that do not fit.

`start` is everywhere the OmegaConf structure of the defaults, which knows keys and types.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


def leaves(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Flat `{"section.key": value}` of nested values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}.{rest}": leaf for rest, leaf in leaves(value).items()})
        else:
            flat[str(key)] = value
    return flat


def fits(start: Any, key: str, value: Any) -> bool:
    """True if the leaf `section.key` can have the value."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    section, _, name = key.rpartition(".")
    try:
        # The section alone: a merge copies all that it begins with.
        OmegaConf.merge(OmegaConf.select(start, section) if section else start, {name: value})
    except (OmegaConfBaseException, ValueError):  # ValueError: there is no such section
        return False
    return True


def did_you_mean(guesses: Iterable[str]) -> str:
    """The end of a message: the first guess, if there is one."""
    return next((f"; did you mean '{guess}'?" for guess in guesses), "")


def unknown_key(start: Any, source: str, full_key: str) -> str:
    """The message about a key that the defaults do not have."""
    known = list(leaves(start)) + _sections(start)
    leaf = full_key.rpartition(".")[2]
    guesses = difflib.get_close_matches(full_key, known, n=1, cutoff=0.6)
    if not guesses:
        by_leaf = {key.rpartition(".")[2]: key for key in known}
        guesses = [by_leaf[m] for m in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.6)]
    return f"{source}: unknown key '{full_key}'{did_you_mean(guesses)}"


def wrong_value(start: Any, source: str, values: Any, error: Any) -> str:
    """The message about a wrong value, with its key, which OmegaConf's own error may lack."""
    key = error.full_key or _first_bad_key(start, values) or "(unknown key)"
    reason = first_line(error)
    if "ListConfig" in reason:  # OmegaConf's own type
        reason = "takes one value, not a list"
    return f"{source}: '{key}': {reason}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message; OmegaConf's errors have more, about its own types."""
    return next(iter(str(error).splitlines()), type(error).__name__).strip()


def _first_bad_key(start: Any, values: Any) -> str | None:
    """The first leaf that cannot be merged, as `key=value`."""
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(values) if OmegaConf.is_config(values) else values
    for key, value in leaves(plain).items():
        if not fits(start, key, value):
            return f"{key}={value}"
    return None


def _sections(start: Any) -> list[str]:
    """Names of all sections: the prefixes of the leaves."""
    parts = [key.split(".") for key in leaves(start)]
    return sorted({".".join(part[:end]) for part in parts for end in range(1, len(part))})
