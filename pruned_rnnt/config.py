"""Configuration: defaults in frozen dataclasses <- YAML file <- `section.key=value`.

This is the only module which knows OmegaConf. A configuration class is a frozen, keyword-only
dataclass which lives beside what it configures; nested ones make sections. A YAML file holds
differences from the defaults only, and may build on another file of the same folder with
`base: other.yaml`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

ConfigT = TypeVar("ConfigT")


class ConfigError(ValueError):
    """A configuration which cannot be used; the message names the key or the file."""


def load_config(
    cls: type[ConfigT],
    yaml_path: str | Path | None = None,
    overrides: Iterable[str] = (),
) -> ConfigT:
    """Build a `cls` from its defaults, a YAML file and `section.key=value` overrides.

    Args:
        cls: frozen dataclass, nested at will.
        yaml_path: file with differences from the defaults, or None.
        overrides: each `section.key=value`; the value is read as YAML.

    Raises:
        ConfigError: missing or malformed file, unknown key, wrong type, value out of range.
    """
    layers: list[tuple[str, Any]] = []
    if yaml_path is not None:
        layers += _read_with_bases(Path(yaml_path), seen=())
    layers += [(f"override '{item}'", _parse_override(item)) for item in overrides]
    return _merge(cls, layers)


def from_dict(cls: type[ConfigT], values: Mapping[str, Any], source: str = "config") -> ConfigT:
    """The inverse of `to_dict`: build a `cls` from nested plain values.

    Args:
        source: what the values came from, for the error message.
    """
    return _merge(cls, [(source, dict(values))])


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain dicts and lists with every key, as saved in checkpoints."""
    from omegaconf import OmegaConf

    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(config)))


def to_yaml(config: Any) -> str:
    """The resolved configuration, every key, as YAML."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(config))


def differences(old: Any, new: Any) -> list[str]:
    """Lines `section.key: old -> new` for every key on which two configurations differ.

    Args:
        old, new: configurations, or nested dicts as from `to_dict`.
    """
    old_leaves, new_leaves = _leaves(old), _leaves(new)
    lines = []
    for key in [*old_leaves, *(key for key in new_leaves if key not in old_leaves)]:
        before, after = old_leaves.get(key, "(absent)"), new_leaves.get(key, "(absent)")
        if before != after:
            lines.append(f"{key}: {before} -> {after}")
    return lines


def _leaves(config: Any) -> dict[str, Any]:
    """Flat `{"section.key": value}` of a configuration or nested dict."""
    values = config if isinstance(config, Mapping) else to_dict(config)
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}.{rest}": leaf for rest, leaf in _leaves(value).items()})
        else:
            flat[str(key)] = value
    return flat


def _read_with_bases(path: Path, seen: tuple[Path, ...]) -> list[tuple[str, Any]]:
    """The file's own values after those of the files it builds on, outermost base first."""
    from omegaconf import DictConfig, OmegaConf

    if not path.is_file():
        raise ConfigError(f"config file not found: {path}")
    if path.resolve() in seen:
        raise ConfigError(f"{path}: `base` leads back to the file itself")
    try:
        values = OmegaConf.load(path)
    except Exception as error:  # the YAML parser's own error types are not part of its interface
        raise ConfigError(f"{path} is not readable as YAML: {error}") from error
    if not isinstance(values, DictConfig):
        raise ConfigError(f"{path}: expected `key: value` lines at the top level")
    base = values.pop("base", None)
    layers = []
    if base is not None:
        layers = _read_with_bases(path.parent / str(base), (*seen, path.resolve()))
    return [*layers, (str(path), values)]


def _parse_override(item: str) -> Any:
    from omegaconf import OmegaConf

    key, equals, _ = item.partition("=")
    if not equals or not key or key.startswith("-"):
        raise ConfigError(f"override '{item}' is not of the form section.key=value")
    try:
        return OmegaConf.from_dotlist([item])
    except Exception as error:
        raise ConfigError(f"override '{item}' cannot be read: {error}") from error


def _merge(cls: type[ConfigT], layers: list[tuple[str, Any]]) -> ConfigT:
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

    merged = OmegaConf.structured(cls)
    for source, values in layers:
        try:
            merged = OmegaConf.merge(merged, values)
        except ConfigKeyError as error:
            raise ConfigError(_unknown_key(cls, source, str(error.full_key))) from error
        except OmegaConfBaseException as error:
            raise ConfigError(_wrong_value(cls, source, values, error)) from error
    try:
        return cast(ConfigT, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise ConfigError(_first_line(error)) from error


def _unknown_key(cls: type, source: str, full_key: str) -> str:
    known = list(_leaves(cls)) + _sections(cls)
    leaf = full_key.rpartition(".")[2]
    guesses = difflib.get_close_matches(full_key, known, n=1, cutoff=0.6)
    if not guesses:
        by_leaf = {key.rpartition(".")[2]: key for key in known}
        guesses = [by_leaf[m] for m in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.6)]
    hint = f"; did you mean '{guesses[0]}'?" if guesses else ""
    return f"{source}: unknown key '{full_key}'{hint}"


def _wrong_value(cls: type, source: str, values: Any, error: Any) -> str:
    """Name the key of a wrong value, also where OmegaConf's own error does not."""
    key = error.full_key or _first_bad_key(cls, values) or "(unknown key)"
    return f"{source}: '{key}': {_first_line(error)}"


def _first_bad_key(cls: type, values: Any) -> str | None:
    """Merge the leaves one at a time to find the one which fails."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    plain = OmegaConf.to_container(values) if OmegaConf.is_config(values) else values
    for key, value in _leaves(plain).items():
        tree: Any = value
        for part in reversed(key.split(".")):
            tree = {part: tree}
        try:
            OmegaConf.merge(OmegaConf.structured(cls), tree)
        except OmegaConfBaseException:
            return f"{key}={value}"
    return None


def _sections(cls: type, prefix: str = "") -> list[str]:
    names: list[str] = []
    for field in dataclasses.fields(cls):
        factory = field.default_factory
        if dataclasses.is_dataclass(factory) and isinstance(factory, type):
            names.append(prefix + field.name)
            names += _sections(factory, f"{prefix}{field.name}.")
    return names


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0].strip()
