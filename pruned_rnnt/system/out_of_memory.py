"""Recognise the errors that mean out of memory, on any device."""

from __future__ import annotations

import torch

# Messages of allocators that raise a plain RuntimeError: CPU, CUDA, CUDA's libraries and
# onnxruntime.
_MESSAGES = (
    "can't allocate memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Failed to allocate memory",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """True if an error of a forward or backward pass means that memory ran out.

    Also true for an error that followed such an error: when memory runs out during the capture of
    a CUDA graph, ending the capture fails with an error of its own.
    """
    if error is None:
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    matches = isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)
    return matches or is_out_of_memory(error.__context__)
