"""The layers of a configuration: YAML files with their bases, overrides and saved values.

A configuration may come from somebody else, with a run, a checkpoint or a repository of models.
Texts are therefore taken as they are written: OmegaConf's `${...}`, which reads environment
variables and other keys, is refused, and so is a `base` outside the folder of its file. Messages
show no content of a file that is not readable as YAML.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_INTERPOLATION = "${"
# OmegaConf has this bound for files, whose lists can repeat each other as those of a checkpoint.
_MOST_VALUES = 10_000
# YAML 1.1 reads 010 as 8, 1:30 as 90 and 1_0 as 10.
_MISREAD = re.compile(r"[-+]?(0[\d_]+|\d[\d_]*(:[0-5]?\d)+(\.[\d_]*)?|\d[\d_.]*_[\d_.]*)")
# Texts without this have no such number. Reading the tokens of a long file takes a while.
_MAY_BE_MISREAD = re.compile(r"\b0\d|\d:\d|\d_")
_IN_A_SHELL = "(in a shell in two kinds of them: '\"...\"')"
IN_QUOTES = f"in quotes {_IN_A_SHELL}"


class ConfigError(ValueError):
    """An invalid configuration; the message names the key or the file."""


class Layer(NamedTuple):
    """Values of one file or override, or of a program.

    source: its name in messages. values: OmegaConf's. respelt: whole numbers that an override has
    in another form, such as 16 for `0x10`.
    """

    source: str
    values: Any
    respelt: frozenset[int] = frozenset()


def configs_folder() -> Path:
    """The folder with the packaged YAML files: inside the package, or beside it in a checkout."""
    installed = Path(__file__).parents[1] / "configs"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "configs"


def config_file(path: str | Path) -> Path:
    """`path` itself, or for a bare name such as `own` the packaged file of that name.

    A file of that name in the current folder takes precedence.

    Raises:
        ConfigError: neither a file nor a packaged name; the message lists the names.
    """
    path = Path(path)
    if path.is_file():
        return path
    if path.name == str(path) and path.suffix in ("", ".yaml"):
        packaged = configs_folder() / f"{path.stem}.yaml"
        if packaged.is_file():
            return packaged
        names = sorted(file.stem for file in configs_folder().glob("*.yaml"))
        guesses = difflib.get_close_matches(path.stem, names, n=1)
        raise ConfigError(
            f"config file not found: {path}, and the packaged ones are {', '.join(names)}"
            f"{did_you_mean(guesses)}"
        )
    return path


def read_with_bases(path: Path, seen: tuple[Path, ...] = ()) -> list[Layer]:
    """The layer of each file: outermost base first, the file at `path` last.

    Raises:
        ConfigError: a file that is missing, unreadable, holds `${...}` or a number that YAML reads
            as another one, or leads to itself; or a base outside the folder of its file.
    """
    if not path.is_file():
        base_note = f" (the `base` of {seen[-1]})" if seen else ""
        raise ConfigError(f"config file not found: {path}{base_note}")
    if path.resolve() in seen:
        raise ConfigError(f"{path}: `base` leads back to the file itself")
    layer = _read_yaml(path)
    base = layer.values.pop("base", None)
    layers = []
    if base is not None:
        if not isinstance(base, str):
            raise ConfigError(f"{path}: 'base' is {base}: it takes the name of one file")
        base_path = path.parent / base
        if not base_path.resolve().is_relative_to(path.parent.resolve()):
            raise ConfigError(f"{path}: 'base={base}' is not in the folder of the file")
        layers = read_with_bases(base_path, (*seen, path.resolve()))
    return [*layers, layer]


def parse_override(item: str) -> Layer:
    """The layer of one `section.key=value`.

    The value is read as YAML; a text that YAML reads otherwise than it is typed needs quotes.

    Raises:
        ConfigError: it has another form, or the value is not YAML, holds `${...}`, is a number
            that YAML reads as another one, or has parts that YAML drops, such as ` # this`.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import GrammarParseError

    source = f"override '{item}'"
    key, equals, text = item.partition("=")
    if not equals or not all(key.split(".")) or key.startswith("-"):
        raise ConfigError(f"{source} is not of the form section.key=value")
    try:
        values = OmegaConf.from_dotlist([item])
        dropped, written = _dropped_and_written(text)
    except GrammarParseError as error:  # of ${...}
        raise _interpolation(source, key) from error
    except Exception as error:  # the YAML parser's own error types are not part of its interface
        reason = getattr(error, "problem", None) or first_line(error)
        raise ConfigError(f"{source} cannot be read: {reason}; write a text {IN_QUOTES}") from error
    _without_interpolation(values, source)
    for _, problem in _misread_numbers(text):
        raise ConfigError(f"{source}: {problem} {_IN_A_SHELL}")
    read = list(_scalars(OmegaConf.to_container(values)))
    if not dropped and any(isinstance(value, str) and value not in written for value in read):
        dropped = "blanks at the ends and line breaks"
    if dropped:
        raise ConfigError(
            f"{source}: YAML drops {dropped}: leave it out, or write the text {IN_QUOTES}"
        )
    numbers = (each for each in read if isinstance(each, int) and not isinstance(each, bool))
    return Layer(source, values, frozenset(each for each in numbers if str(each) not in written))


def _dropped_and_written(text: str) -> tuple[str, set[str]]:
    """What YAML drops from a value, to be shown, and its texts and numbers as they are typed."""
    import yaml

    if text and not text.strip():
        return "blanks", set()
    tokens = list(_tokens(text))
    end, written = 0, set()
    for token in tokens:
        start, stop = token.start_mark.index, token.end_mark.index
        # What belongs to no token is a comment.
        dropped = text[end:start].strip()
        if not dropped and isinstance(
            token,
            yaml.AliasToken
            | yaml.AnchorToken
            | yaml.DirectiveToken
            | yaml.DocumentEndToken
            | yaml.DocumentStartToken
            | yaml.TagToken,
        ):
            dropped = text[start:stop]
        if isinstance(token, yaml.ScalarToken) and token.style in ("|", ">"):
            dropped = token.style
        if dropped:
            return repr(dropped), set()
        end = max(end, stop)
        if isinstance(token, yaml.ScalarToken):
            # Between the start and the end of the stream.
            typed = text if len(tokens) == 3 else text[start:stop]
            written.add(typed if token.plain else token.value)
    return "", written


def plain_values(values: Mapping[str, Any], source: str) -> Layer:
    """Values that a program or a checkpoint gives, as a layer.

    Raises:
        ConfigError: they are not nested plain values, or hold `${...}`.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import GrammarParseError, OmegaConfBaseException

    _check_size(values, source)
    try:
        plain = OmegaConf.create(dict(values))
    except GrammarParseError as error:  # of ${...}
        raise _interpolation(source, str(error.full_key)) from error
    except (OmegaConfBaseException, ValueError, RecursionError) as error:
        key = getattr(error, "full_key", None)  # of a value of another type
        where = f"{source}: '{key}'" if key else source
        raise ConfigError(f"{where}: {first_line(error)}") from error
    return Layer(source, _without_interpolation(plain, source))


def _without_interpolation(values: Any, source: str) -> Any:
    """The values themselves.

    Raises:
        ConfigError: they hold `${...}`; the message names the key.
    """
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(values, resolve=False)
    for key, leaf in leaves(plain).items():
        if any(isinstance(each, str) and _INTERPOLATION in each for each in _scalars(leaf)):
            raise _interpolation(source, key)
    return values


def _check_size(values: Mapping[str, Any], source: str) -> None:
    count, waiting = 0, [values]
    while waiting:
        value: Any = waiting.pop()
        items = list(value.values()) if isinstance(value, Mapping) else value
        if isinstance(items, list | tuple):
            count += len(items)
            waiting += items
        if count > _MOST_VALUES:
            raise ConfigError(f"{source}: the configuration has more than {_MOST_VALUES:,} values")


def _interpolation(source: str, key: str) -> ConfigError:
    return ConfigError(
        f"{source}: '{key}' holds '{_INTERPOLATION}': a configuration is taken as it is written, "
        "without environment variables or other keys; write the value itself"
    )


def _scalars(value: Any) -> Iterator[Any]:
    """The value, or all that are in it if it is nested."""
    if isinstance(value, Mapping):
        yield from _scalars(list(value.values()))
    elif isinstance(value, list):
        for item in value:
            yield from _scalars(item)
    else:
        yield value


def _read_yaml(path: Path) -> Layer:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import GrammarParseError

    try:
        values = OmegaConf.load(path)
    except GrammarParseError as error:  # of ${...}
        raise _interpolation(str(path), str(error.full_key)) from error
    except Exception as error:  # the YAML parser's own error types are not part of its interface
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark is not None else str(path)
        reason = getattr(error, "problem", None) or first_line(error)
        raise ConfigError(f"{where}: not readable as YAML: {reason}") from error
    if not isinstance(values, DictConfig):
        raise ConfigError(f"{path}: expected `key: value` lines at the top level")
    for line, problem in _misread_numbers(path.read_text(encoding="utf-8")):
        raise ConfigError(f"{path}, line {line}: {problem}")
    return Layer(str(path), _without_interpolation(values, str(path)))


def _misread_numbers(text: str) -> Iterator[tuple[int, str]]:
    """Lines and messages of the numbers in YAML that are read as others than they seem."""
    import yaml

    if not _MAY_BE_MISREAD.search(text):
        return
    for token in _tokens(text):
        if isinstance(token, yaml.ScalarToken) and token.plain and _MISREAD.fullmatch(token.value):
            yield (
                token.start_mark.line + 1,
                f"YAML reads {token.value} as {yaml.safe_load(token.value)!r}: write a number "
                "without leading zeros, colons and underscores, and a text in quotes",
            )


def _tokens(text: str) -> Iterator[Any]:
    """The tokens of a YAML text."""
    import yaml

    # OmegaConf's choice: the loaders differ in tabs.
    tokens: Iterator[Any] = yaml.scan(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tokens


def leaves(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Flat `{"section.key": value}` of nested values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}.{rest}": leaf for rest, leaf in leaves(value).items()})
        else:
            flat[str(key)] = value
    return flat


def did_you_mean(guesses: Iterable[str]) -> str:
    """The end of a message: the first guess, if there is one."""
    return next((f"; did you mean '{guess}'?" for guess in guesses), "")


def first_line(error: BaseException) -> str:
    """The first line of an error's message; OmegaConf's errors have more, about its own types."""
    return next(iter(str(error).splitlines()), type(error).__name__).strip()
