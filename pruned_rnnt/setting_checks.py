"""Ranges of settings, checked where configuration classes are made."""

from __future__ import annotations


def check_at_least(section: str, config: object, **least: float) -> None:
    """Refuse settings that are too small.

    Args:
        section: where they are in configuration files, e.g. `model.encoder`, for the message.
        config: object that has them as attributes; of a tuple every entry is checked, and None
            passes.
        least: the smallest value of each, by name.

    Raises:
        ValueError: naming the key, what it is and what it needs; also for NaN.
    """
    for name, bound in least.items():
        value = getattr(config, name)
        values = value if isinstance(value, tuple | list) else (value,)
        if not all(entry is None or entry >= bound for entry in values):
            shown = list(value) if isinstance(value, tuple) else value
            raise ValueError(f"{section}.{name} is {shown}, needs at least {bound}")


def check_fractions(section: str, config: object, *names: str, below_one: bool = False) -> None:
    """Refuse settings that are no share of something: 0 to 1, or less than 1 if `below_one`.

    Raises:
        ValueError: naming the key, what it is and what it needs.
    """
    for name in names:
        value = getattr(config, name)
        if not 0 <= value <= 1 or (below_one and value == 1):
            needs = "0 <= x < 1" if below_one else "0 to 1"
            raise ValueError(f"{section}.{name} is {value}, needs {needs}")
