"""Functions that torch.compile keeps as single nodes of its graph, without importing Dynamo."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

_AnyFunction = TypeVar("_AnyFunction", bound=Callable[..., Any])

_DYNAMO = "torch._dynamo"
_FUNCTIONS: list[Callable[..., Any]] = []


def opaque_to_compile(function: _AnyFunction) -> _AnyFunction:
    """Keeps calls of `function` as single nodes of torch.compile's graph, for AOTAutograd to trace:
    Dynamo of torch 2.11 fails on autograd functions with optional tensor arguments or symbolic
    sizes.

    The decorator of torch imports Dynamo, which takes as long as torch itself. Here Dynamo learns
    of the functions when something else imports it.
    """
    if _DYNAMO in sys.modules:
        sys.modules[_DYNAMO].allow_in_graph(function)
    else:
        _FUNCTIONS.append(function)
    return function


class _ImportOfDynamo(MetaPathFinder):
    """Passes the functions to Dynamo at the end of its import."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != _DYNAMO:
            return None
        others = (x.find_spec(fullname, path, target) for x in sys.meta_path if x is not self)
        spec = next(filter(None, others), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_pass(dynamo: ModuleType) -> None:
            execute(dynamo)
            # Only now: others may look for the spec without importing the module.
            sys.meta_path.remove(self)
            for function in _FUNCTIONS:
                dynamo.allow_in_graph(function)

        spec.loader.exec_module = execute_and_pass  # type: ignore[assignment]
        return spec


if _DYNAMO not in sys.modules:
    sys.meta_path.insert(0, _ImportOfDynamo())
