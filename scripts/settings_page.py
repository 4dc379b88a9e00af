"""Writes docs/reference/settings.md, the table of all settings.

python -m scripts.settings_page
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from pruned_rnnt.config.help import field_meanings, with_choices
from pruned_rnnt.config.load import differences
from pruned_rnnt.config.written import value_as_yaml
from pruned_rnnt.train.experiment import ExperimentConfig
from pruned_rnnt.train.tasks.lm_task import LanguageModelExperiment

PAGE = Path(__file__).parent.parent / "docs/reference/settings.md"
_HEADER = """\
# Settings

All settings of configuration files and of `section.key=value` on the command line. In a YAML file,
a section is a key with its settings indented below it. `pruned-rnnt inspect CONFIG --keys` prints
the settings of one configuration. On the command line, too, a value is read as YAML. A text that
YAML would read otherwise than it is typed (`1.10`, `no`, `0x10`, `a #b`) is refused unless it is
quoted. The shell removes one pair of quotes, so write two: `'data.path="a #b"'`. `python -m
scripts.settings_page` writes this page from the docstrings of the configuration classes.

"""


def rendered() -> str:
    """The text of the page."""
    experiments = {
        "Recognisers": ExperimentConfig(),
        "Language models": LanguageModelExperiment(),
    }
    return _HEADER + _tables(experiments)


def _tables(experiments: Mapping[str, Any]) -> str:
    """Tables of all settings with default and meaning, one per section, below a heading each.

    Args:
        experiments: default configurations by the title of their chapter. Sections of a class that
            an earlier chapter has are not repeated.
    """
    printed: dict[type, Any] = {}
    parts: list[str] = []
    for title, config in experiments.items():
        parts.append(f"## {title}")
        parts += _chapter(config, "", printed)
    return "\n\n".join(parts) + "\n"


def _chapter(section: Any, name: str, printed: dict[type, Any], heading: str = "") -> Iterator[str]:
    """The table of a section, then those of its sub-sections, or of each kind of them."""
    printed[type(section)] = section
    if heading:
        yield f"### {heading}"
    if rows := list(_rows(section)):
        yield "\n".join(["| setting | default | meaning |", "| --- | --- | --- |", *rows])
    for field in dataclasses.fields(section):
        inner = getattr(section, field.name)
        if not dataclasses.is_dataclass(inner):
            continue
        path = f"{name}.{field.name}" if name else field.name
        if type(inner) in printed:
            changed = differences(printed[type(inner)], inner)
            values = [re.sub(": .* -> ", "=", line) for line in changed]
            others = ", ".join(f"`{value}`" for value in values)
            yield f"`{path}` has the settings above" + (f", with {others}." if others else ".")
        elif "kinds" in field.metadata:
            for kind, cls in field.metadata["kinds"].items():
                yield from _chapter(cls(), path, printed, f"{path}, kind {kind}")
        else:
            yield from _chapter(inner, path, printed, path)


def _rows(section: Any) -> Iterator[str]:
    """Rows of a table; settings that share an entry of the docstring share a row."""
    meanings, field_types = field_meanings(type(section)), get_type_hints(type(section))
    settings = [
        (
            with_choices(meanings.get(field.name, ""), field_types[field.name]),
            f"`{field.name}`",
            f"`{value_as_yaml('x', getattr(section, field.name))[3:]}`",
        )
        for field in dataclasses.fields(section)
        if not dataclasses.is_dataclass(getattr(section, field.name))
    ]
    for meaning, group in itertools.groupby(settings, key=lambda setting: setting[0]):
        _, names, defaults = zip(*group, strict=True)
        text = meaning.replace("|", "\\|")
        yield f"| {', '.join(names)} | {', '.join(defaults)} | {text} |"


if __name__ == "__main__":
    PAGE.write_text(rendered(), encoding="utf-8")
