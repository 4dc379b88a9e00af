"""Choice between the fused kernels and plain torch, and its line in the log."""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from pruned_rnnt.model.kernels.target import is_absent
from pruned_rnnt.system.out_of_memory import is_out_of_memory
from pruned_rnnt.system.switched_kernels import ENCODERS, why_switched

logger = logging.getLogger("pruned_rnnt")

MODES = ("auto", "off")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Triton's interpreter runs kernels on the CPU, for development.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_mode = "auto"


def use_kernels(*tensors: Tensor) -> bool:
    """True if fused kernels can process these tensors, False if plain torch must."""
    if _mode == "off" or torch.compiler.is_compiling():
        return False
    for x in tensors:  # a generator would take the host twice as long
        if not _is_reachable(x) or x.dtype not in _DTYPES or x.numel() == 0:
            return False
    return is_absent() or not _obstacle()


def train_with_kernels(*tensors: Tensor) -> bool:
    """True if fused kernels can process these tensors and a backward pass may follow: for what
    serves the backward pass alone."""
    return torch.is_grad_enabled() and use_kernels(*tensors)


def use_own_function(*tensors: Tensor, differentiable: bool = True) -> bool:
    """True if these tensors go to an autograd function of the package, which has the fused kernels
    and saves little for the backward pass; False in inference without kernels, where torch's
    functions serve as well.

    differentiable: False if the result has no gradient even where gradients are enabled.
    """
    return (differentiable and torch.is_grad_enabled()) or use_kernels(*tensors)


def _is_reachable(x: Tensor) -> bool:
    if _INTERPRETED or not x.is_cuda:
        return _INTERPRETED or is_absent()
    # Kernels are launched on the current device, whatever the device of the tensors.
    if x.device.index == torch._C._cuda_getDevice():
        return True
    _warn_of_device(x.device)
    return False


@cache
def _warn_of_device(device: torch.device) -> None:
    _warned(f"{device} is not the current device: call torch.cuda.set_device({device.index})")


def set_mode(mode: str) -> None:
    """`auto`: fused kernels wherever they can run. `off`: plain torch everywhere.

    Raises:
        ValueError: the mode is none of these.
    """
    global _mode
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}, needs to be one of {', '.join(MODES)}")
    _mode = mode


def kernel_report(device: torch.device) -> str:
    """A line for the log: whether fused kernels run on the device, and if not, why not."""
    if _mode == "off":
        return "fused encoder kernels: off"
    if device.type != "cuda":
        return f"fused encoder kernels: not used on {device.type}"
    obstacle = _obstacle()
    return f"fused encoder kernels: {f'not used, {obstacle}' if obstacle else 'used'}"


@cache
def _obstacle() -> str:
    """The reason why no kernel can run in this process; empty if kernels run.

    The first call logs the reason as a warning. Running out of memory raises, so that the next call
    tries again.
    """
    if find_spec("triton") is None:
        return _warned("Triton is not installed: run pip install triton")
    if reason := why_switched(ENCODERS, "cpu" if _INTERPRETED else "cuda"):
        return reason  # a warning has said so
    try:
        call_first_kernel(torch.device("cpu" if _INTERPRETED else "cuda"))
    # Triton compiles a kernel at its first call, which needs a writable folder.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return _warned(f"the first kernel fails ({text[:200]})")
    return ""


def call_first_kernel(device: torch.device) -> None:
    """Call a kernel, which shows whether Triton works."""
    from pruned_rnnt.model.kernels.swoosh import swoosh_forward

    swoosh_forward(torch.zeros(1, device=device), None, (4.0, 0.035, 0.08), torch.float32)


def _warned(reason: str) -> str:
    logger.warning("the encoders run in plain torch, which can take four times as long: %s", reason)
    return reason
