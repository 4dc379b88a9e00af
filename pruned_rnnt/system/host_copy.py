"""Asynchronous copies from the device to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopy:
    """Copies that the device makes after the work launched before; only `tensors` waits for them.

    Args:
        tensors: on any device.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # Copies to the host are asynchronous on CUDA only.
        device = next((each.device for each in tensors if each.is_cuda), None)
        self._tensors = [each.to("cpu", non_blocking=each.is_cuda) for each in tensors]
        self._copied: torch.cuda.Event | None = None
        if device is not None:
            # `blocking` lets the waiting thread sleep, which leaves its core to other threads.
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record(torch.cuda.current_stream(device))

    def tensors(self) -> list[Tensor]:
        """The tensors, on the CPU."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensors


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; the host does not wait for a copy to a GPU."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
