"""Help for every setting of a configuration: YAML with comments.

The meaning of a field is its entry `name: text` (or `name, other: text`) in the docstring of its
dataclass or of a base class; continuation lines are indented.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pruned_rnnt.config.load import to_dict
from pruned_rnnt.config.written import value_as_yaml

_WIDTH = 80
_ENTRY = re.compile(r"^(\w+(?:, \w+)*):(?: +(.*))?$")


def settings_as_yaml(config: Any) -> str:
    """All settings of a configuration: YAML that `--config` takes.

    The comment above each setting has its meaning, its unit and its default.
    """
    return "\n".join(_section_lines(config, type(config)(), to_dict(config), indent="")) + "\n"


def _section_lines(
    section: Any, defaults: Any, values: dict[str, Any], indent: str
) -> Iterator[str]:
    meanings, field_types = field_meanings(type(section)), get_type_hints(type(section))
    for field in dataclasses.fields(section):
        value, meaning = getattr(section, field.name), meanings.get(field.name, "")
        if dataclasses.is_dataclass(value):
            yield f"{indent}{field.name}:"
            own = _default(field, defaults)
            inner = own if type(own) is type(value) else None
            yield from _section_lines(value, inner, values[field.name], f"{indent}  ")
            continue
        meaning = with_choices(meaning, field_types[field.name])
        default = _default(field, defaults)
        if default is not dataclasses.MISSING:
            meaning = f"{meaning} ({value_as_yaml('default', default)})"
        lead = f"{indent}# "
        yield from textwrap.wrap(
            meaning, _WIDTH, initial_indent=lead, subsequent_indent=lead, break_on_hyphens=False
        )
        yield textwrap.indent(value_as_yaml(field.name, values[field.name]), indent)


def with_choices(meaning: str, field_type: Any) -> str:
    """The meaning of a setting, with its choices if its type lists several."""
    choices = get_args(field_type)
    if len(choices) > 1 and get_origin(field_type) is Literal:
        return f"{meaning} One of {', '.join(choices)}."
    return meaning


def field_meanings(cls: type) -> dict[str, str]:
    """The text about each field in the docstrings of a configuration class and its bases."""
    meanings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            meanings.update(_entries(inspect.cleandoc(base.__doc__ or "")))
    return {f.name: meanings[f.name] for f in dataclasses.fields(cls) if f.name in meanings}


def _entries(docstring: str) -> dict[str, str]:
    found: dict[str, str] = {}
    names: list[str] = []
    for line in docstring.splitlines():
        entry = _ENTRY.match(line)
        if entry:
            names = entry[1].split(", ")
            found.update(dict.fromkeys(names, (entry[2] or "").strip()))
        elif line.startswith(" ") and names:
            text = f"{found[names[0]]} {line.strip()}".strip()
            found.update(dict.fromkeys(names, text))
        else:
            names = []
    return found


def _default(field: dataclasses.Field[Any], defaults: Any) -> Any:
    if defaults is not None:
        return getattr(defaults, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
