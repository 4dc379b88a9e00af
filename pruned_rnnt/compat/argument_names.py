"""Errors of the losses in the argument names of another package."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def named_as(theirs: Mapping[str, str]) -> Callable[[_Function], _Function]:
    """Decorates a function of another package, whose arguments reach ours under other names: in
    messages of TypeError and ValueError, each of our names becomes theirs."""
    names = sorted(map(re.escape, theirs), key=len, reverse=True)
    ours = re.compile(rf"(?<![\w.])({'|'.join(names)})(?![\w=])")

    def decorate(function: _Function) -> _Function:
        @wraps(function)
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
