"""Launches of Triton kernels that take the host a few microseconds.

Triton binds, checks and hashes all arguments at every call, which takes the host several times as
long as a torch op. This launcher looks up the compiled kernel by the properties that Triton
specialises on: dtypes, alignment of pointers, divisibility of integers, and constants. Sizes such
as numbers of channels are arguments rather than constants, so that one compiled variant serves all
models and layers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from pruned_rnnt.model.kernels import variants

_ALIGNMENT = 16
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Kernel:
    """A Triton function with a table of its compiled variants.

    Args:
        function: the Python function.
        unspecialised: names of integers on whose values Triton does not specialise.

    Attributes:
        compiled: variants by device and by `specialisation`.
    """

    def __init__(self, function: Callable[..., Any], unspecialised: tuple[str, ...]) -> None:
        self.jit = triton.jit(function, do_not_specialize=list(unspecialised))
        self.compiled: dict[Any, Any] = {}
        names = list(self.jit.arg_names)
        self._plain = frozenset(names.index(name) for name in unspecialised)
        self._constant = frozenset(getattr(self.jit, "constexprs", ()))

    def __call__(self, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4) -> None:
        """Launch on the current stream, with all arguments of the function in its order."""
        if INTERPRETED:
            self.jit[grid](*arguments)
            return
        device = torch.cuda.current_device()
        key = (device, num_warps, *self.specialisation(arguments))
        if variants.collector is not None:
            variants.collector.add(self, key, arguments, num_warps)
            return
        compiled = self.compiled.get(key)
        if compiled is None:
            compiled = variants.compile_variant(self.jit, device, arguments, num_warps)
            self.compiled[key] = compiled
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)
        compiled.run(
            x,
            y,
            z,
            stream,
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *arguments,
        )

    def specialisation(self, arguments: tuple[Any, ...]) -> list[Any]:
        """The properties of arguments of which each combination is compiled by itself."""
        parts: list[Any] = []
        for index, value in enumerate(arguments):
            if isinstance(value, Tensor):
                parts.append((value.dtype, value.data_ptr() % _ALIGNMENT == 0))
            elif index in self._constant or value is None:
                parts.append(value)
            elif isinstance(value, float):
                parts.append(0.0)
            elif index not in self._plain:
                parts.append((value % _ALIGNMENT == 0, value == 1, value >= 2**31))
            else:
                parts.append(value >= 2**31)
        return parts


def kernel(*unspecialised: str) -> Callable[[Callable[..., Any]], Kernel]:
    """Decorator that makes a `Kernel` of a Triton function."""
    return lambda function: Kernel(function, unspecialised)


def divide_up(count: int, size: int) -> int:
    """count / size, rounded up. (triton.cdiv takes the host ten times as long.)"""
    return -(-count // size)


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
