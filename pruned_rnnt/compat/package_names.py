"""The names of another package, in a module that stands for it: errors have its argument names, and
names that the module does not define come from the package."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Python looks up many special names in modules; only this one is passed on to the package.
_SPECIAL = ("__version__",)


class NotThereError(AttributeError):
    """Neither the compat module nor the package has the name."""


def attribute_of(
    package: str, name: str, module: str, stand_in: Callable[[str], Any] | None = None
) -> Any:
    """package.name, or a stand-in for it where the package cannot be imported.

    Args:
        package: the package, or one of its modules, as it is imported.
        name: the attribute.
        module: the compat module, for the message.
        stand_in: returns the replacement for a name, or raises KeyError.

    Raises:
        NotThereError: an AttributeError with the reason why the package could not be imported.
    """
    if name.startswith("__") and name not in _SPECIAL:
        raise NotThereError(f"module {module!r} has no attribute {name!r}")
    found = imported_package(package)
    if isinstance(found, ModuleType):
        return getattr(found, name)
    if stand_in is not None:
        try:
            return stand_in(name)
        except KeyError:
            pass
    raise NotThereError(
        f"module {module!r} has no {name!r} of its own, and {package}, which may have it, could "
        f"not be imported: {found}"
    )


@functools.cache
def imported_package(package: str) -> ModuleType | str:
    """The package, or why it cannot be imported. Cached, because Python repeats failed imports,
    which take long."""
    try:
        found = importlib.import_module(package)
    except (ImportError, OSError) as error:  # OSError: a library built for another torch
        return str(error)
    if found.__name__.startswith("pruned_rnnt."):
        return f"the name {package} refers to {found.__name__} here"
    return found


def named_as(theirs: Mapping[str, str]) -> Callable[[_Function], _Function]:
    """Decorates a function of another package, whose arguments reach ours under other names: in
    messages of TypeError and ValueError, each of our names becomes theirs."""
    names = sorted(map(re.escape, theirs), key=len, reverse=True)
    ours = re.compile(rf"(?<![\w.])({'|'.join(names)})(?![\w=])")

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def renaming(*arguments: Any, **named: Any) -> Any:
            try:
                return function(*arguments, **named)
            except (TypeError, ValueError) as error:
                text = str(error)
                renamed = ours.sub(lambda found: theirs[found[1]], text)
                if renamed == text:
                    raise
                raise type(error)(renamed) from error

        return renaming  # type: ignore[return-value]

    return decorate
