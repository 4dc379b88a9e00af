"""The op library `pruned_rnnt`, and how an op is added to it.

A raw op writes into tensors its caller allocated and returns nothing, so that a failed allocation
is torch's own OutOfMemoryError; it writes every element of every output, and has no gradient. The
fallback is plain torch for every device; once a compiled library is loaded, the dispatcher prefers
its kernels on their device.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.utils import checkpoint

NAMESPACE = "pruned_rnnt"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
NEG_INF = float("-inf")
# Replaces the logarithm of 0 where infinities would give NaN: half of it is below every sum of
# other log-probabilities.
LOG_ZERO = -1e30

# The topologies by name, with their numbers in the kernels (csrc/topology.h).
RNNT_TYPES = {"regular": 0, "modified": 1, "constrained": 2, "rna": 3}
REGULAR, MODIFIED, CONSTRAINED, RNA = RNNT_TYPES.values()

# All ops by name in the order of definition, each with its fallback: for the backend report, and
# for tests that compare a compiled kernel with its fallback.
FALLBACKS: dict[str, Callable[..., None]] = {}

# For a device type whose compiled kernels should have been built and are missing: the warning that
# the first fallback call gives. load_native fills this in; the warning removes its entry.
MISSING_KERNELS: dict[str, str] = {}

_Written = TypeVar("_Written")
# Marks a parameter of an op, a tensor or a named tuple of tensors, as an output.
Out = Annotated[_Written, "output"]
# Integers are symbolic in torch.compile and torch.export, so that one graph serves all sizes.
_SCHEMA_TYPES = {
    Tensor: "Tensor",
    int: "SymInt",
    float: "float",
    bool: "bool",
    list[int]: "SymInt[]",
}


def op(fallback: Callable[..., None]) -> Callable[..., None]:
    """Declares the op of the fallback's name (without a leading underscore); returns its caller.

    The fallback's annotations give the schema: Tensor, int, float, bool and list[int], `| None` of
    these, and named tuples of them, whose fields are arguments of their own. Out[...] marks
    outputs. A call passes such tuples whole or field by field; those with tuples in them, field by
    field.
    """
    hints = get_type_hints(fallback, include_extras=True)
    hints.pop("return")
    outputs = (f"a{number}!" for number in count())
    schema = ", ".join(x for name, hint in hints.items() for x in _declared(name, hint, outputs))
    takers = [_taker(hint) for hint in hints.values()]

    @functools.wraps(fallback)
    def gathered(*arguments: Any) -> None:
        rest = iter(arguments)
        fallback(*[take(rest) for take in takers])

    overload = define(f"{fallback.__name__.lstrip('_')}({schema}) -> ()", gathered)

    @functools.wraps(fallback)
    def call(*arguments: Any) -> None:
        # A loop: generators take several times as long, as long as a small kernel.
        fields: list[Any] = []
        for x in arguments:
            if isinstance(x, tuple):
                fields.extend(x)  # torch.compile of torch 2.11 knows no += of named tuples
            else:
                fields.append(x)
        overload(*fields)

    return call


def _taker(hint: Any) -> Callable[[Iterator[Any]], Any]:
    """Takes a parameter from the arguments, of which each is one field."""
    bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if not hasattr(bare, "_fields"):
        return next
    fields = [_taker(field) for field in get_type_hints(bare).values()]
    if all(take is next for take in fields):
        return lambda rest: bare(*islice(rest, len(fields)))
    return lambda rest: bare(*[take(rest) for take in fields])


def _declared(name: str, hint: Any, outputs: Iterator[str]) -> Iterator[str]:
    """The arguments of the schema for a parameter."""
    is_output = get_origin(hint) is Annotated
    bare = get_args(hint)[0] if is_output else hint
    if hasattr(bare, "_fields"):
        for field, inner in get_type_hints(bare).items():
            yield from _declared(field, Annotated[inner, "output"] if is_output else inner, outputs)
        return
    members = (bare,) if bare in _SCHEMA_TYPES else get_args(bare)
    required = next(x for x in members if x is not type(None))
    alias = f"({next(outputs)})" if is_output else ""
    optional = "?" if len(members) > 1 else ""
    yield f"{_SCHEMA_TYPES[required]}{alias}{optional} {name}"


def new_outputs(
    count: int, like: Tensor, shape: Sequence[int], dtype: torch.dtype
) -> Sequence[Tensor]:
    """Uninitialised tensors for the outputs of an op, on the device of `like`.

    They are parts of one allocation, which takes the host less time, but not while a compiler
    traces: with dynamic sizes, inductor (torch 2.11 to 2.13) makes an op write all of them into
    the first part.
    """
    # Functions that are opaque to Dynamo may not know that it compiles; their tensors are fake.
    if type(like) is not Tensor or torch.compiler.is_compiling():
        return [like.new_empty(shape, dtype=dtype) for _ in range(count)]
    return like.new_empty((count, *shape), dtype=dtype).unbind(0)


def declare(schema: str) -> torch._ops.OpOverload:
    """Adds an op `name(...) -> ()` without kernels; returns the overload to call."""
    LIBRARY.define(schema)
    overload: torch._ops.OpOverload = getattr(
        torch.ops.pruned_rnnt, schema.partition("(")[0]
    ).default
    # Selective activation checkpointing caches the return values of an op. These ops return nothing
    # and write to their arguments: the recomputation would skip a cached op and leave its output
    # buffers uninitialised. torch always recomputes the ops in this set.
    always_recomputed: set[torch._ops.OpOverload] = getattr(checkpoint, "SAC_IGNORED_OPS", set())
    always_recomputed.add(overload)
    return overload


def define(schema: str, fallback: Callable[..., None]) -> torch._ops.OpOverload:
    """Adds an op `name(...) -> ()` with its fallback; returns the overload to call."""
    name = schema.partition("(")[0]
    overload = declare(schema)
    LIBRARY.impl(name, _with_warning(fallback), "CompositeExplicitAutograd")
    # The fake does nothing: outputs come in as arguments, shapes are already known.
    LIBRARY.impl(name, lambda *_, **__: None, "Meta")
    FALLBACKS[name] = fallback
    return overload


def _with_warning(fallback: Callable[..., None]) -> Callable[..., None]:
    """The fallback; its first call on a device without the expected kernels gives a warning."""

    @functools.wraps(fallback)
    def run(*arguments: Any, **named: Any) -> None:
        # A compiler traces with fake tensors, which have a device too, but nothing runs there yet.
        if MISSING_KERNELS and not torch.compiler.is_compiling():
            device = next((x.device.type for x in arguments if isinstance(x, Tensor)), "")
            if message := MISSING_KERNELS.pop(device, ""):
                warnings.warn(message, UserWarning, stacklevel=1)
        fallback(*arguments, **named)

    return run


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and recursions: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
