"""Configuration: defaults in frozen dataclasses <- YAML file <- `section.key=value`.

Only this folder uses OmegaConf for our own settings. A configuration class is a frozen,
keyword-only dataclass beside the code that it configures; nested ones make sections. A YAML file
holds differences from the defaults only, and may extend another file of its folder with `base:
other.yaml`. If a file or an override chooses another `kind` of a section, the settings that earlier
files have there do not count, because they are those of the other kind.

`start` is everywhere the OmegaConf structure of the defaults, which knows keys and types.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from pruned_rnnt.config.files import (
    IN_QUOTES,
    Layer,
    config_file,
    did_you_mean,
    first_line,
    leaves,
    parse_override,
    plain_values,
    read_with_bases,
)
from pruned_rnnt.config.files import (
    ConfigError as ConfigError,
)

ConfigT = TypeVar("ConfigT")
_ABSENT = object()


def load_config(
    cls: type[ConfigT],
    yaml_path: str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    base: tuple[str, Mapping[str, Any]] | None = None,
    is_run: bool = False,
) -> ConfigT:
    """Build a `cls` from its defaults, a YAML file and `section.key=value` overrides.

    Args:
        cls: frozen dataclass, which may nest others.
        base: name and nested values of a layer between the defaults and the file.
        yaml_path: file with differences from the defaults, or the name of a packaged one (`own`
            for configs/own.yaml), or None.
        overrides: each `section.key=value`; the value is read as YAML, and refused if YAML drops a
            part of it, or reads a text otherwise than it is typed: such a text needs quotes.
        is_run: the file is that of a run that is not trained further: settings that this version
            has no more are skipped.

    Raises:
        ConfigError: missing or malformed file, unknown key, wrong type, value out of range.
    """
    layers = [plain_values(base[1], base[0])] if base is not None else []
    chosen = [parse_override(item) for item in overrides]
    if yaml_path is not None:
        files = read_with_bases(config_file(yaml_path))
        # A run keeps the kinds that it was trained with.
        _drop_other_kinds(cls, files, [] if is_run else chosen)
        layers += files
    if is_run:
        _drop_removed(cls, layers, refuse=False)
    layers += chosen
    _drop_removed(cls, layers, refuse=True)
    return _merge(cls, layers)


def value_of(key: str, yaml_path: str | Path | None = None, overrides: Iterable[str] = ()) -> Any:
    """The value that a YAML file or overrides give to `key` or `section.key`, for any class.

    None if neither sets it, or the last one that does has no value. Raises ConfigError as
    `load_config` if they cannot be read.
    """
    return given_values(yaml_path, overrides)(key)


def given_values(
    yaml_path: str | Path | None = None, overrides: Iterable[str] = ()
) -> Callable[[str], Any]:
    """`value_of` for any number of keys, whose file and overrides are read once."""
    layers = read_with_bases(config_file(yaml_path)) if yaml_path is not None else []
    layers += [parse_override(item) for item in overrides]

    def value(key: str) -> Any:
        values = [_select(layer.values, key, _ABSENT) for layer in layers]
        return next((value for value in reversed(values) if value is not _ABSENT), None)

    return value


def from_dict(cls: type[ConfigT], values: Mapping[str, Any], source: str = "config") -> ConfigT:
    """The inverse of `to_dict`: build a `cls` from nested plain values.

    Args:
        source: origin of the values, for the error message.
    """
    layers = [plain_values(values, source)]
    _drop_removed(cls, layers, refuse=False)
    return _merge(cls, layers)


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain dicts, lists and tuples with every key, as saved in checkpoints."""
    return dataclasses.asdict(config)


def differences(old: Any, new: Any) -> list[str]:
    """Lines `section.key: old -> new` for every key in which two configurations differ.

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
    return leaves(config if isinstance(config, Mapping) else to_dict(config))


def _merge(cls: type[ConfigT], layers: list[Layer]) -> ConfigT:
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

    start = _defaults(cls, layers)
    # Copied once: OmegaConf.merge copies all settings for each layer.
    merged = copy.deepcopy(start)
    for layer in layers:
        source, values = layer.source, layer.values
        _restore_words(start, layer)
        try:
            merged = OmegaConf.unsafe_merge(merged, values)
        except ConfigKeyError as error:
            raise ConfigError(_unknown_key(start, source, str(error.full_key))) from error
        except (OmegaConfBaseException, TypeError) as error:
            raise ConfigError(_wrong_value(start, source, values, error)) from error
    try:
        return cast(ConfigT, OmegaConf.to_object(merged))
    # Configuration classes raise ValueError for values out of range.
    except (ValueError, OmegaConfBaseException) as error:
        raise ConfigError(first_line(error)) from error


def _restore_words(start: Any, layer: Layer) -> None:
    """Replaces what YAML does not read as a text: `off`, and nothing for an empty one.

    Nothing is an empty text only where that is the default: `train.folder=` is a mistake.

    Raises:
        ConfigError: a text, also in a list, may have been another one, as 1.1 for 1.10, 16 for
            0x10, False for no, or None for null.
    """
    from omegaconf import OmegaConf

    for key, value in _leaves(OmegaConf.to_container(layer.values)).items():
        items = value if _is_list(value) else [value]
        misread = [
            item
            for item in items
            if item is None
            or isinstance(item, bool | float)
            or (isinstance(item, int) and item in layer.respelt)  # a section is not hashable
        ]
        if not misread:
            continue
        default = _select(start, key)
        if type(value) is type(default) and not _is_list(value):
            continue
        word = "on" if value else "off"
        needs_text = isinstance(default, str) or (_is_list(default) and _fits(start, key, ["a"]))
        if value is None and default == "":
            OmegaConf.update(layer.values, key, "")
        elif isinstance(value, bool) and not _fits(start, key, value) and _fits(start, key, word):
            OmegaConf.update(layer.values, key, word)
        elif needs_text and _fits(start, key, value):
            raise ConfigError(
                f"{layer.source}: '{key}' needs a text, and YAML reads yours as {misread[0]!r}: "
                f"write it {IN_QUOTES}, or a path with ./ before it"
            )


def _defaults(cls: type, layers: list[Layer]) -> Any:
    """Defaults of `cls`, with the classes of sections that the layers choose by `kind`.

    A section that may be one of several classes is a field with their common base class as its
    type and `metadata={"kinds": {name: class}}`, with the name of the function that adds classes of
    the user's own as `"register"`, if there is one. The last `kind: name` of the layers decides,
    and replaces the others in `layers`.
    """
    from omegaconf import OmegaConf

    chosen = []
    for key, metadata in _sections_with_kinds(cls):
        kinds = metadata["kinds"]
        choices = [
            (layer.source, node)
            for layer in layers
            if isinstance(node := OmegaConf.select(layer.values, key), MutableMapping)
            and "kind" in node
        ]
        for source, node in choices:
            kind = node["kind"]
            if not isinstance(kind, str) or kind not in kinds:
                guesses = difflib.get_close_matches(str(kind), kinds, n=1)
                names = ", ".join(kinds) + did_you_mean(guesses)
                if not guesses and (register := metadata.get("register")):
                    names += (
                        f"; if it is your own, import the file that calls {register}, or run that "
                        "file in place of pruned-rnnt (docs/extend.md)"
                    )
                raise ConfigError(f"{source}: '{key}.kind={kind}' is none of {names}")
        if choices:
            last = choices[-1][1]["kind"]
            chosen.append((key, kinds[last]))
            for _, node in choices:
                node["kind"] = last
    return _structured(cls, tuple(chosen))


@functools.cache
def _structured(cls: type, chosen: tuple[tuple[str, type], ...] = ()) -> Any:
    """The defaults of `cls`, with other classes of sections; not to be changed.

    A copy takes a fifth of the time.
    """
    from omegaconf import OmegaConf, read_write

    start = OmegaConf.structured(cls)
    for key, section in chosen:
        parent, _, name = key.rpartition(".")
        node = OmegaConf.select(start, parent) if parent else start
        with read_write(node):
            node[name] = OmegaConf.structured(section)
    return start


def _drop_other_kinds(cls: type, files: list[Layer], overrides: list[Layer]) -> None:
    """Removes the settings of a section for which a later file or an override chooses another kind.

    The overrides count together, whatever their order.
    """
    from omegaconf import OmegaConf

    start = _structured(cls)
    for key, _ in _sections_with_kinds(cls):
        kind = OmegaConf.select(start, key)["kind"]
        earlier: list[Any] = []
        for layers in (*([file] for file in files), overrides):
            nodes = [OmegaConf.select(layer.values, key) for layer in layers]
            nodes = [node for node in nodes if isinstance(node, MutableMapping)]
            last = next((node["kind"] for node in reversed(nodes) if "kind" in node), kind)
            if last != kind:
                for other in earlier:
                    other.clear()
                kind, earlier = last, []
            earlier += nodes


def _drop_removed(cls: type, layers: list[Layer], *, refuse: bool) -> None:
    """Removes settings that `cls` no longer has from the layers.

    Raises:
        ConfigError: one has an effect, and `refuse`; otherwise it is skipped or replaced.
    """
    from omegaconf import OmegaConf

    removals = [
        (prefix, name, removed)
        for prefix, section in _sections(cls)
        for name, removed in getattr(section, "REMOVED", {}).items()
    ]
    for layer in layers:
        source, values = layer.source, layer.values
        for prefix, name, removed in removals:
            node = OmegaConf.select(values, prefix[:-1]) if prefix else values
            if not isinstance(node, MutableMapping) or name not in node:
                continue
            value = node[name]
            if removed.replacements and value not in removed.replacements:
                continue
            if refuse and value != removed.unused:
                shown = f"{prefix}{name}={value}" if removed.replacements else f"{prefix}{name}"
                raise ConfigError(f"{source}: '{shown}' was removed: {removed.advice}")
            if removed.replacements:
                node[name] = removed.replacements[value]
            else:
                del node[name]


def _sections_with_kinds(cls: type) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The keys of the sections of several kinds, with the metadata of their fields."""
    for prefix, section in _sections(cls):
        for field in dataclasses.fields(section):
            if "kinds" in field.metadata:
                yield prefix + field.name, field.metadata


def _sections(cls: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    """`cls` and the classes of its sections, with the prefixes of their keys."""
    yield prefix, cls
    for field in dataclasses.fields(cls):
        section = field.default_factory
        is_section = isinstance(section, type) and dataclasses.is_dataclass(section)
        if is_section and "kinds" not in field.metadata:
            yield from _sections(cast(type, section), f"{prefix}{field.name}.")


def _fits(start: Any, key: str, value: Any) -> bool:
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


def _unknown_key(start: Any, source: str, full_key: str) -> str:
    """The message about a key that the defaults do not have."""
    known = list(leaves(start)) + _section_names(start)
    section, _, leaf = full_key.rpartition(".")
    if full_key in known:
        return (
            f"{source}: '{full_key}' has its section in the key: write '{section}:' on a line of "
            f"its own, and '{leaf}: ...' indented below it"
        )
    guesses = difflib.get_close_matches(full_key, known, n=1, cutoff=0.6)
    if not guesses:
        by_leaf = {key.rpartition(".")[2]: key for key in known}
        guesses = [by_leaf[m] for m in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.6)]
    return f"{source}: unknown key '{full_key}'{did_you_mean(guesses)}"


def _wrong_value(start: Any, source: str, values: Any, error: Any) -> str:
    """The message about a wrong value, with its key, which OmegaConf's own error may lack."""
    # A TypeError has no key.
    key = getattr(error, "full_key", None) or _first_bad_key(start, values) or "(unknown key)"
    return f"{source}: '{key}': {_reason(start, values, key.partition('=')[0], error)}"


def _reason(start: Any, values: Any, key: str, error: Exception) -> str:
    """Why a value is wrong, without the types of OmegaConf that its own message names."""
    wanted, given = _select(start, key), _select(values, key)
    if isinstance(wanted, Mapping):
        inner = next(iter(leaves(wanted)), "key")
        return f"is a section: set the keys in it, such as {key}.{inner}"
    if _is_list(wanted) and not _is_list(given):
        example = "a, b" if given is None or isinstance(given, bool) else given
        return f"needs a list, such as {key}=[{example}]"
    if isinstance(given, Mapping):
        return f"takes one value, and YAML reads yours as a section: write a text {IN_QUOTES}"
    reason = first_line(error)
    if "does not match type hint length" in reason:
        return f"needs {reason.rpartition(' ')[2]} values, got {len(given)}"
    if "ListConfig" in reason:
        advice = f": write a text {IN_QUOTES}" if isinstance(wanted, str) else ""
        return f"takes one value, not a list{advice}"
    if "$VALUE" in reason and _is_list(given):  # OmegaConf's placeholders
        wrong = next((x for x in given if not _fits(start, key, [x] * len(given))), given)
        kind = type(wrong).__name__
        reason = reason.replace("$VALUE_TYPE", kind).replace("$VALUE", str(wrong))
    # Above, not each whole number is a float.
    is_whole = isinstance(given, float) and given.is_integer() and abs(given) < 1e15
    if "to Integer" in reason and is_whole:
        return f"{reason}: write {given:.0f}"
    return "needs a value, got none" if "'None'" in reason else reason


def _select(node: Any, key: str, default: Any = None) -> Any:
    """The value at `section.key`; `default` if there is none, or the section is a list."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    with suppress(OmegaConfBaseException):
        return OmegaConf.select(node, key, default=default)
    return default


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _first_bad_key(start: Any, values: Any) -> str | None:
    """The first leaf that cannot be merged, as `key=value`."""
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(values) if OmegaConf.is_config(values) else values
    for key, value in leaves(plain).items():
        if not _fits(start, key, value):
            return f"{key}={value}"
    return None


def _section_names(start: Any) -> list[str]:
    """Names of all sections: the prefixes of the leaves."""
    parts = [key.split(".") for key in leaves(start)]
    return sorted({".".join(part[:end]) for part in parts for end in range(1, len(part))})
