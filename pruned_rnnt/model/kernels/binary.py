"""Compiled kernels on a GPU: loaded and launched by CUDA's driver.

Triton's launchers are C extensions, which are compiled on the user's machine (by gcc) and take the
host several times as long. Arguments are packed into memory that the driver copies at each launch:

    memory     [x_ptr   |grad_ptr|count|frames|shift| 0      ]    at the alignment of each type
    addresses   ^        ^        ^     ^      ^      ^ ^ ^       the last ones all point to the 0

The driver reads as many addresses as the kernel has arguments. The last ones serve the pointers to
scratch memory that Triton appends to the arguments of every kernel (two, up to Triton 3.9), and
that no kernel of this package uses.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

# Types of arguments as Triton names them, and the character of each for `struct`; pointers: q.
_CHARACTERS = {"i32": "i", "i64": "q", "fp32": "f"}
_SCRATCH_ARGUMENTS = 4
_SHARED_BYTES_WITHOUT_ATTRIBUTE = 48 * 1024
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_MAX_SHARED_BYTES_OF_DEVICE = 97
_INVALID_CONTEXT = 201


class TooLargeError(RuntimeError):
    """A kernel needs more shared memory than the device has."""


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
        TooLargeError: the device has too little shared memory.
        RuntimeError: the driver cannot load it.
    """

    def __init__(self, image: Image) -> None:
        most = most_shared_bytes(torch._C._cuda_getDevice())
        if image.shared_bytes > most:
            raise TooLargeError(
                f"kernel {image.name} needs {image.shared_bytes} bytes of shared memory, and the "
                f"GPU has {most}"
            )
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        driver = _driver()
        self._name = image.name
        self._call(driver.cuModuleLoadData, ctypes.byref(module), image.cubin)
        self._call(driver.cuModuleGetFunction, ctypes.byref(function), module, image.name.encode())
        if image.shared_bytes > _SHARED_BYTES_WITHOUT_ATTRIBUTE:
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
        # Memory for arguments that no launch is using.
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
    """Give this thread the context of its current device, as torch does at its own first launch."""
    context, device = ctypes.c_void_p(), torch._C._cuda_getDevice()
    driver = _driver()
    if not driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        driver.cuCtxSetCurrent(context)


@cache
def most_shared_bytes(device: int) -> int:
    """The shared memory of the device that a block of threads can have."""
    found = ctypes.c_int(2**31 - 1)  # if the driver does not say
    _driver().cuDeviceGetAttribute(ctypes.byref(found), _MAX_SHARED_BYTES_OF_DEVICE, device)
    return found.value


@cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
    driver.cuModuleLoadData.argtypes = [pointer, ctypes.c_char_p]
    driver.cuModuleGetFunction.argtypes = [pointer, pointer, ctypes.c_char_p]
    driver.cuFuncSetAttribute.argtypes = [pointer, number, number]
    driver.cuLaunchKernel.argtypes = [pointer, *[size] * 7, pointer, pointer, pointer]
    driver.cuDeviceGetAttribute.argtypes = [pointer, number, number]
    driver.cuGetErrorString.argtypes = [number, pointer]
    driver.cuDevicePrimaryCtxRetain.argtypes = [pointer, number]
    driver.cuCtxSetCurrent.argtypes = [pointer]
    return driver
