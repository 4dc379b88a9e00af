"""Start a GPU in a thread, while this one imports libraries and reads a model.

The first matrix product and convolution of a process create the device's context and load cuBLAS
and cuDNN, which takes longer than a second, mostly outside of Python's lock.
"""

from __future__ import annotations

import logging
from threading import Thread

import torch

logger = logging.getLogger(__name__)


def start_device(device: torch.device) -> Thread | None:
    """The thread that starts a CUDA device; None for other devices.

    An error in it is only logged: whoever uses the device gets it again.
    """
    if device.type != "cuda":
        return None
    thread = Thread(target=_start, args=(device,), name="device start", daemon=True)
    thread.start()
    return thread


def _start(device: torch.device) -> None:
    try:
        with torch.inference_mode():
            x = torch.zeros((1, 16, 16, 16), device=device)
            torch.nn.functional.conv2d(x, x, padding=1)
            torch.matmul(x, x)
            torch.cuda.synchronize(device)
    except Exception as error:
        logger.debug("%s could not be started: %s", device, error)
