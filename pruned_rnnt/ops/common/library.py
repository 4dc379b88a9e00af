"""The op library `pruned_rnnt`, and the one way an op enters it.

A raw op writes into tensors its caller allocated and returns nothing, so that a failed allocation
is torch's own OutOfMemoryError; it writes every element of every output, and it knows no autograd.
The fallback is plain torch for every device; a compiled library, once loaded, takes over the
devices it implements because the dispatcher prefers a kernel of the device itself.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

NAMESPACE = "pruned_rnnt"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")

RNNT_TYPES = {"regular": 0, "modified": 1, "constrained": 2, "rna": 3}
REGULAR, MODIFIED, CONSTRAINED, RNA = RNNT_TYPES.values()

# Names of all ops in the order of definition, each with its fallback: for the backend report, and
# for tests that compare a compiled kernel with its fallback.
FALLBACKS: dict[str, Callable[..., None]] = {}

# For a device type whose compiled kernels should be there and are not: the warning that its first
# fallback is to give. Filled in by load_native, emptied by the warning.
MISSING_KERNELS: dict[str, str] = {}


AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def opaque_to_compile(function: AnyFunction) -> AnyFunction:
    """Leaves calls of `function` in torch.compile's graph as they are, for AOTAutograd to trace:
    Dynamo of torch 2.11 fails on autograd functions whose arguments are optional tensors, or whose
    sizes are symbolic."""
    return cast(AnyFunction, torch.compiler.allow_in_graph(function))


def _no_outputs(*_: object, **__: object) -> None:
    """The fake of every op: outputs come in as arguments, shapes are already known."""


def define(schema: str, fallback: Callable[..., None]) -> torch._ops.OpOverload:
    """Adds an op `name(...) -> ()` with its fallback; returns the overload to call."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, _with_warning(fallback), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _no_outputs, lib=LIBRARY)
    FALLBACKS[name] = fallback
    overload: torch._ops.OpOverload = getattr(torch.ops.pruned_rnnt, name).default
    return overload


def _with_warning(fallback: Callable[..., None]) -> Callable[..., None]:
    """The fallback, which says once for each device that compiled kernels are missing there."""

    @functools.wraps(fallback)
    def run(*arguments: Any, **named: Any) -> None:
        if MISSING_KERNELS:
            _warn_of_missing_kernels(arguments)
        fallback(*arguments, **named)

    return run


def _warn_of_missing_kernels(arguments: tuple[Any, ...]) -> None:
    # Fake tensors of a compiler that traces have a device too, but nothing runs there yet.
    if torch.compiler.is_compiling():
        return
    device = next((x.device.type for x in arguments if isinstance(x, Tensor)), "")
    message = MISSING_KERNELS.pop(device, "")
    if message:
        warnings.warn(message, UserWarning, stacklevel=2)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums and recursions run in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
