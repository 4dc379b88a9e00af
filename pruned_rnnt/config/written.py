"""Configurations and single values as text: YAML, and overrides for the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pruned_rnnt.config.files import ConfigError, parse_override


def to_yaml(config: Any) -> str:
    """The resolved configuration, every key, as YAML."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(config))


def plain_yaml(values: Mapping[str, Any]) -> str:
    """Nested plain values as YAML, in their order; texts are quoted where YAML needs it."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dict(values))) if values else "{}\n"


def value_as_yaml(key: str, value: Any) -> str:
    """`key: value` of a plain value, without a line break at the end; lists in brackets."""
    from omegaconf import OmegaConf

    if isinstance(value, list | tuple):
        return f"{key}: [{', '.join(value_as_yaml('x', item)[3:] for item in value)}]"
    return OmegaConf.to_yaml({key: value}).strip()


def as_override(key: str, value: str | Path) -> str:
    """`section.key=value`, the value in quotes where YAML would not read it as this text."""
    text = str(value)
    with suppress(ConfigError):
        if parse_override(f"x={text}").values.x == text:
            return f"{key}={text}"
    return f"{key}={json.dumps(text, ensure_ascii=False)}"
