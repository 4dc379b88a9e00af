"""The plan of a comparison: variants of a configuration, and the searches that decode each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One change of the configuration.

    config: replaces that of the plan. settings: `section.key=value`, after those of the plan.
    searches: names of further searches of the plan for this variant alone.
    """

    config: str = ""
    settings: tuple[str, ...] = ()
    searches: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A file of variants.

    config: name or path of the configuration. settings: for all variants.
    splits: to decode. searches: settings of each search by name; all variants are decoded with
        those in `default_searches`.
    """

    config: str
    settings: tuple[str, ...] = ()
    splits: tuple[str, ...] = ("dev", "test")
    searches: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"greedy": ()})
    default_searches: tuple[str, ...] = ("greedy",)
    variants: Mapping[str, Variant] = field(default_factory=lambda: {"base": Variant()})


@dataclass(frozen=True, kw_only=True)
class Run:
    """A variant with a seed. settings: all that differ from the configuration."""

    variant: str
    seed: int
    folder: Path
    config: str
    settings: tuple[str, ...]


def read_plan(path: Path) -> Plan:
    """Reads a plan from YAML.

    Raises:
        ValueError: a key is unknown or a value has another form; the message names file and key.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} needs keys such as `config`, got {content!r}")
    fields = _known(path, "", content, Plan)
    if "config" not in fields:
        raise ValueError(f"{path} lacks the key `config`, the configuration to train")
    for key in ("settings", "splits", "default_searches"):
        if key in fields:
            fields[key] = _strings(path, key, fields[key])
    for key, values in (("searches", "lists of settings"), ("variants", "changes")):
        if not isinstance(fields.get(key, {}), dict):
            raise ValueError(f"{path}: {key} needs names with their {values}, got {fields[key]!r}")
    if "searches" in fields:
        fields["searches"] = {
            name: _strings(path, f"searches.{name}", settings)
            for name, settings in fields["searches"].items()
        }
    if "variants" in fields:
        fields["variants"] = {
            str(name): _variant(path, f"variants.{name}", content or {})
            for name, content in fields["variants"].items()
        }
    plan = Plan(**fields)
    for where, names in (
        ("default_searches", plan.default_searches),
        *((f"variants.{name}.searches", v.searches) for name, v in plan.variants.items()),
    ):
        for name in names:
            if name not in plan.searches:
                raise ValueError(
                    f"{path}: {where} has {name!r}, which is not in searches: "
                    f"{', '.join(plan.searches)}"
                )
    return plan


def _variant(path: Path, where: str, content: Any) -> Variant:
    fields = _known(path, f"{where}.", content, Variant)
    for key in ("settings", "searches"):
        if key in fields:
            fields[key] = _strings(path, f"{where}.{key}", fields[key])
    return Variant(**fields)


def _known(path: Path, prefix: str, content: Any, kind: type) -> dict[str, Any]:
    known = list(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    if not isinstance(content, dict):
        raise ValueError(f"{path}: {prefix.rstrip('.')} needs keys ({', '.join(known)})")
    for key in content:
        if key not in known:
            raise ValueError(f"{path}: unknown key {prefix}{key}; there are {', '.join(known)}")
    return dict(content)


def _strings(path: Path, key: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"{path}: {key} needs a list, got {value!r}")
    return tuple(str(item) for item in value)
