"""Whether fused kernels run, and what the log says about it."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor

MODES = ("auto", "off")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_has_triton = find_spec("triton") is not None
_mode = os.environ.get("PRUNED_RNNT_FUSED", "auto")
if _mode not in MODES:
    raise ValueError(f"PRUNED_RNNT_FUSED is {_mode!r}, needs to be one of {', '.join(MODES)}")


def use_kernels(*tensors: Tensor) -> bool:
    """True if the fused kernels take these tensors, False if the plain twin has to."""
    if not _has_triton or _mode == "off" or torch.compiler.is_compiling():
        return False
    return all(
        (x.is_cuda or _INTERPRETED) and x.dtype in _DTYPES and x.numel() > 0 for x in tensors
    )


def set_mode(mode: str) -> None:
    """`auto`: kernels wherever they run. `off`: plain torch everywhere.

    Raises:
        ValueError: another mode.
    """
    global _mode
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}, needs to be one of {', '.join(MODES)}")
    _mode = mode


def report() -> str:
    """One line for the log: what runs, and if it is not the kernels, why."""
    if _mode == "off":
        return "fused encoder kernels: off"
    if not _has_triton:
        return "fused encoder kernels: not used, Triton is not installed"
    if not torch.cuda.is_available():
        return "fused encoder kernels: not used, they need CUDA"
    return "fused encoder kernels: used"
