"""Launches of Triton kernels that take the host a few microseconds.

Triton binds, checks and hashes all arguments at every call, which takes the host several times as
long as a torch op. This launcher looks up the compiled kernel by the properties that Triton
specialises on: dtypes, alignment of pointers, divisibility of integers (by 8 instead of Triton's
16), and constants. Sizes such as numbers of channels are arguments rather than constants, so that
one compiled variant serves all models and layers. CUDA's driver launches what Triton has compiled
(see `binary`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from pruned_rnnt.model.kernels import variants
from pruned_rnnt.model.kernels.binary import Binary

# What divides addresses of aligned tensors, and numbers of elements of whole vectors of 16 bytes,
# in half precision and float32.
_ALIGNMENT, _DIVISOR = 16, 8
_CONSTANT, _PLAIN, _SPECIALISED = "constant", "plain", "specialised"
# The types of pointers without and with alignment.
_POINTERS = {
    dtype: (f"*{name}", f"*{name}:{_ALIGNMENT}")
    for dtype, name in (
        (torch.float32, "fp32"),
        (torch.bfloat16, "bf16"),
        (torch.float16, "fp16"),
        (torch.float64, "fp64"),
        (torch.int64, "i64"),
        (torch.int32, "i32"),
        (torch.uint8, "u8"),
        (torch.bool, "i1"),
    )
}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Bound(NamedTuple):
    """Arguments of a kernel.

    Attributes:
        parts: of each argument, the type of a pointer or number, and what divides it;
            the value itself of a constant, of None and of a 1 on which Triton specialises.
        values: addresses and numbers of the arguments whose type is in `parts`.
    """

    parts: list[Any]
    values: list[int | float]


class Kernel:
    """A Triton function with a table of its compiled variants.

    Args:
        function: the Python function.
        unspecialised: names of integers on whose values Triton does not specialise, and of
            pointers on whose alignment it does not: those of which a program reads few numbers.

    Attributes:
        compiled: variants by device, number of warps and `Bound.parts`.
    """

    def __init__(self, function: Callable[..., Any], unspecialised: tuple[str, ...]) -> None:
        self.jit = triton.jit(function, do_not_specialize=list(unspecialised))
        self.compiled: dict[Any, Binary] = {}
        constant = frozenset(getattr(self.jit, "constexprs", ()))
        self._kinds = [
            _CONSTANT if index in constant else _PLAIN if name in unspecialised else _SPECIALISED
            for index, name in enumerate(self.jit.arg_names)
        ]

    def __call__(self, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4) -> None:
        """Launch on the current stream, with all arguments of the function in its order."""
        if INTERPRETED:
            self.jit[grid](*arguments)
            return
        parts, values = self.bind(arguments)
        if variants.collector is not None:
            variants.collector.add(self, num_warps, parts)
            return
        device = torch._C._cuda_getDevice()
        key = (device, num_warps, *parts)
        binary = self.compiled.get(key)
        if binary is None:
            binary = self.compiled[key] = variants.compile_variant(self.jit, key)
        x, y, z = (*grid, 1, 1)[:3]
        if x and y and z:
            stream = torch._C._cuda_getCurrentRawStream(device)
            binary.launch((x, y, z), stream, values)

    def bind(self, arguments: tuple[Any, ...]) -> Bound:
        """What arguments are compiled into, and what is left to pass at each launch."""
        parts: list[Any] = []
        values: list[int | float] = []
        for value, kind in zip(arguments, self._kinds, strict=True):
            if kind is _CONSTANT or value is None:
                parts.append(value)
            elif isinstance(value, Tensor):
                address = value.data_ptr()
                plain, aligned = _POINTERS[value.dtype]
                is_plain = kind is _PLAIN or address % _ALIGNMENT
                parts.append(plain if is_plain else aligned)
                values.append(address)
            elif isinstance(value, float):
                parts.append("fp32")
                values.append(value)
            elif kind is _SPECIALISED and value == 1:
                parts.append(1)
            else:
                width = "i32" if value < 2**31 else "i64"
                is_divided = kind is _SPECIALISED and value % _DIVISOR == 0
                parts.append(f"{width}:{_DIVISOR}" if is_divided else width)
                values.append(value)
        return Bound(parts, values)


def kernel(*unspecialised: str) -> Callable[[Callable[..., Any]], Kernel]:
    """Decorator that makes a `Kernel` of a Triton function."""
    return lambda function: Kernel(function, unspecialised)


def divide_up(count: int, size: int) -> int:
    """count / size, rounded up. (triton.cdiv takes the host ten times as long.)"""
    return -(-count // size)


def column_block(columns: int) -> int:
    """The block of a program that takes whole rows. Fewer than 256 columns have no blocks of their
    own, which would be more variants to compile."""
    return max(power_of_two(columns), 256)


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
