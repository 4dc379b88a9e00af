"""The GPU that kernels are chosen for: the current device, or one that this machine need not have.

Within `chosen_for`, models on the CPU call the kernels that they would call on a GPU of a certain
compute capability. `variants.listed` notes which these are; nothing can be launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pruned_rnnt.model.kernels.binary import most_shared_bytes

# Shared memory that a block of threads can have, by compute capability.
SHARED_BYTES = {
    80: 166_912,
    86: 101_376,
    87: 166_912,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    103: 232_448,
    110: 232_448,
    120: 101_376,
    121: 101_376,
}
_absent: int | None = None


def is_absent() -> bool:
    """True within `chosen_for`."""
    return _absent is not None


def on_gpu(x: Tensor) -> bool:
    """True if x is on a GPU, or is treated so."""
    return x.is_cuda or _absent is not None


def shared_bytes() -> int:
    """The shared memory that a block of threads can have."""
    if _absent is not None:
        return SHARED_BYTES[_absent]
    return most_shared_bytes(torch._C._cuda_getDevice())


@contextmanager
def chosen_for(capability: int) -> Iterator[None]:
    """Choose kernels for a GPU of a compute capability (90 for 9.0), for tensors on the CPU.

    Raises:
        ValueError: the capability is none of `SHARED_BYTES`.
    """
    global _absent
    if capability not in SHARED_BYTES:
        known = ", ".join(map(str, SHARED_BYTES))
        raise ValueError(f"capability is {capability}, needs to be one of {known}")
    before, _absent = _absent, capability
    try:
        yield
    finally:
        _absent = before
