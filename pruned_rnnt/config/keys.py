"""Keys of nested configuration values, and explanations of keys and values that do not fit.

`start` is everywhere the OmegaConf structure of the defaults, which knows keys and types.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
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
    # ValueError: there is no such section; TypeError: a mapping where a list belongs.
    except (OmegaConfBaseException, ValueError, TypeError):
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
    # A TypeError has no key.
    key = getattr(error, "full_key", None) or _first_bad_key(start, values) or "(unknown key)"
    return f"{source}: '{key}': {_reason(start, values, key.partition('=')[0], error)}"


def _reason(start: Any, values: Any, key: str, error: Exception) -> str:
    """Why a value is wrong, without the types of OmegaConf that its own message names."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        wanted, given = OmegaConf.select(start, key), OmegaConf.select(values, key)
    except OmegaConfBaseException:  # a key below a list
        wanted = given = None
    if isinstance(wanted, Mapping):
        inner = next(iter(leaves(wanted)), "key")
        return f"is a section: set the keys in it, such as {key}.{inner}"
    if _is_list(wanted) and not _is_list(given):
        return f"needs a list, such as {key}=[{'a, b' if given is None else given}]"
    reason = first_line(error)
    if "ListConfig" in reason:
        return "takes one value, not a list"
    return "needs a value, got none" if "'None'" in reason else reason


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


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
