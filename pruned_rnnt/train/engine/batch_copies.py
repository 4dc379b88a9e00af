"""Batches on their way to the device.

On CUDA the host launches a step while the device still computes the one before. A copy on the
stream of the kernels would wait for that, and then the kernels would wait for the copy; so copies
have a stream of their own, and run while the device computes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor


class BatchCopies:
    """Copies batches to a device.

    Args:
        device: the device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Any) -> Any:
        """`batch.to(device)`; on CUDA the current stream waits for the copies, the host does not.

        Args:
            batch: a dataclass with a method `to`; its tensors should be in page-locked memory.
        """
        if self._stream is None:
            return batch.to(self._device)
        with torch.cuda.stream(self._stream):
            moved = batch.to(self._device)
        kernels = torch.cuda.current_stream(self._device)
        kernels.wait_stream(self._stream)
        for field in dataclasses.fields(moved):
            value = getattr(moved, field.name)
            if isinstance(value, Tensor) and value.is_cuda:
                # The allocator must not give its memory to the next copy before the kernels end.
                value.record_stream(kernels)
        return moved
