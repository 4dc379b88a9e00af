"""Which errors mean that memory ran out, on any device."""

from __future__ import annotations

import torch

# What allocators say whose errors have no type of their own: of the CPU, of CUDA, of its libraries.
_MESSAGES = (
    "can't allocate memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error of a forward or backward pass says that memory ran out.

    Or came of one that does: ending the capture of a CUDA graph which ran out fails as well.
    """
    if error is None:
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    says_so = isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)
    return says_so or is_out_of_memory(error.__context__)
