"""Asynchronous copies of numbers from the device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy that the device makes after the work launched before; only `values` waits for it.

    Args:
        values_K: (K,) on any device.
    """

    def __init__(self, values_K: Tensor) -> None:
        # Copies to the host are asynchronous on CUDA only.
        asynchronous = values_K.is_cuda
        self._values_K = values_K.to("cpu", non_blocking=asynchronous)
        self._copied: torch.cuda.Event | None = None
        if asynchronous:
            # `blocking` lets the waiting thread sleep, which leaves its core to the data loader.
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record()

    def values(self) -> list[float]:
        """The numbers."""
        if self._copied is not None:
            self._copied.synchronize()
        values: list[float] = self._values_K.tolist()
        return values
