"""Compiled kernels on a GPU: loaded and launched by CUDA's driver.

Triton's own launcher is a C extension for each combination of argument types, which needs gcc on
the user's machine, and takes the host several times as long. Arguments are packed into memory that
the driver copies at each launch:

    memory     [x_ptr   |grad_ptr|count|frames|shift| 0      ]    at the alignment of each type
    addresses   ^        ^        ^     ^      ^      ^ ^ ^       all further ones are those of 0

A kernel reads as many addresses as it has arguments. The further ones are for scratch memory that
Triton adds to the arguments of each kernel, and which no kernel of this package has.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

# Types of arguments as Triton names them, and the character of each for `struct`; pointers: q.
_CHARACTERS = {"i32": "i", "i64": "q", "fp32": "f"}
_SCRATCH_ARGUMENTS = 4
_MOST_STATIC_SHARED_BYTES = 48 * 1024
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_INVALID_CONTEXT = 201


class Image(NamedTuple):
    """A kernel as the compiler has made it.

    Attributes:
        name: of the function in the binary.
        cubin: the binary.
        types: of the arguments that the function takes, such as `*bf16`, `i32` and `fp32`.
        shared_bytes: shared memory of a block of threads.
        threads: of a block.
    """

    name: str
    cubin: bytes
    types: tuple[str, ...]
    shared_bytes: int
    threads: int


class Binary:
    """A kernel that is loaded on the current device.

    Raises:
        RuntimeError: the driver cannot load it.
    """

    def __init__(self, image: Image) -> None:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        driver = _driver()
        self._name = image.name
        self._call(driver.cuModuleLoadData, ctypes.byref(module), image.cubin)
        self._call(driver.cuModuleGetFunction, ctypes.byref(function), module, image.name.encode())
        if image.shared_bytes > _MOST_STATIC_SHARED_BYTES:
            self._call(
                driver.cuFuncSetAttribute,
                function,
                _MAX_DYNAMIC_SHARED_SIZE_BYTES,
                image.shared_bytes,
            )
        self._launch = driver.cuLaunchKernel
        self._function = function.value
        self._threads, self._shared_bytes = image.threads, image.shared_bytes
        types = "".join("q" if each[0] == "*" else _CHARACTERS[each] for each in image.types)
        self._struct = struct.Struct(f"@{types}")
        self._offsets = [
            struct.calcsize(f"@{types[: end + 1]}") - struct.calcsize(types[end])
            for end in range(len(types))
        ]
        # Taken by one thread at a time.
        self._free: list[_Arguments] = []

    def launch(
        self, grid: tuple[int, int, int], stream: int, values: Sequence[int | float]
    ) -> None:
        """Launch on a stream of the current device, with addresses and numbers as arguments.

        Raises:
            RuntimeError: the driver refuses it.
        """
        try:
            arguments = self._free.pop()
        except IndexError:
            arguments = _Arguments.new(self._struct.size, self._offsets)
        self._struct.pack_into(arguments.memory, 0, *values)
        self._call(
            self._launch,
            self._function,
            *grid,
            self._threads,
            1,
            1,
            self._shared_bytes,
            stream,
            arguments.addresses,
            None,
        )
        self._free.append(arguments)

    def _call(self, function: Any, *arguments: Any) -> None:
        status = function(*arguments)
        if status == _INVALID_CONTEXT:
            _use_context_of_current_device()
            status = function(*arguments)
        if status:
            text = ctypes.c_char_p()
            _driver().cuGetErrorString(status, ctypes.byref(text))
            reason = text.value.decode() if text.value else f"status {status}"
            raise RuntimeError(f"CUDA error: {reason} (kernel {self._name})")


class _Arguments(NamedTuple):
    """Memory for the arguments of a launch, and where each of them lies."""

    memory: Any
    addresses: Any

    @classmethod
    def new(cls, size: int, offsets: Sequence[int]) -> _Arguments:
        memory = ctypes.create_string_buffer(size + 16)
        start = ctypes.addressof(memory)
        zeros = -(-size // 8) * 8
        places = [*offsets, *[zeros] * _SCRATCH_ARGUMENTS]
        addresses = (ctypes.c_void_p * len(places))(*[start + place for place in places])
        return cls(memory, addresses)


def _use_context_of_current_device() -> None:
    """Let this thread use the context that torch has made; torch does so at its first launch."""
    import torch

    context = ctypes.c_void_p()
    driver = _driver()
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), torch.cuda.current_device())
    driver.cuCtxSetCurrent(context)


@cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
    driver.cuModuleLoadData.argtypes = [pointer, ctypes.c_char_p]
    driver.cuModuleGetFunction.argtypes = [pointer, pointer, ctypes.c_char_p]
    driver.cuFuncSetAttribute.argtypes = [pointer, number, number]
    driver.cuLaunchKernel.argtypes = [pointer, *[size] * 7, pointer, pointer, pointer]
    driver.cuGetErrorString.argtypes = [number, pointer]
    driver.cuDevicePrimaryCtxRetain.argtypes = [pointer, number]
    driver.cuCtxSetCurrent.argtypes = [pointer]
    return driver
