"""Work of a GPU that the host does not wait for: its start, and copies to and from it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from threading import RLock, Thread

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_triton_reader: Thread | None = None


def start_device(device: torch.device, *, compiles: bool) -> Thread | None:
    """The thread that starts a CUDA device, while this one imports libraries and reads a model.

    The first matrix product and convolution of a process create the device's context and load
    cuBLAS and cuDNN, which takes longer than a second, mostly outside of Python's lock. None for
    other devices. An error in it is only logged: whoever uses the device gets it again.

    Args:
        compiles: whether kernels may have to be compiled. Another thread then lets Triton hash its
            files, hundreds of MB, as it does before the first one.
    """
    global _triton_reader
    if device.type != "cuda":
        return None
    thread = Thread(target=_start, args=(device,), name="device start", daemon=True)
    thread.start()
    if compiles and _triton_reader is None:
        _triton_reader = Thread(target=_read_triton, name="read Triton", daemon=True)
        _triton_reader.start()
    return thread


def missing_device(index: int) -> str:
    """Why there is no CUDA device of this number; empty if there is."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = "no CUDA device" if not count else f"{count} CUDA device{'s' * (count > 1)}"
    return f"torch {torch.__version__} sees {devices}" if index >= count else ""


def wait_for_triton() -> None:
    """Wait for the thread of `start_device`, so that this one does not hash the files too."""
    if _triton_reader is not None:
        _triton_reader.join()


def _read_triton() -> None:
    with suppress(Exception):
        from triton.runtime.cache import triton_key

        # Triton remembers the result.
        triton_key()


def _start(device: torch.device) -> None:
    try:
        with torch.inference_mode():
            x = torch.zeros((1, 16, 16, 16), device=device)
            torch.nn.functional.conv2d(x, x, padding=1)
            torch.matmul(x, x)
            torch.cuda.synchronize(device)
    except Exception as error:
        logger.debug("%s could not be started: %s", device, error)


class DeviceLock:
    """Lets one thread at a time use states and graphs, which may take the lock several times.

    A deep or pickled copy of its owner gets a lock of its own.
    """

    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[DeviceLock], tuple[()]]:
        return DeviceLock, ()


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
