"""Integers of either size as int32, the size that the kernels read."""

from __future__ import annotations

import torch
from torch import Tensor

_LIMITS = torch.iinfo(torch.int32)


def as_int32(x: Tensor) -> Tensor:
    """x as contiguous int32 on its device. Values outside its range become the largest or
    smallest int32: cut to their low bits they could be valid lengths or symbols."""
    if x.dtype != torch.int32:
        x = x.clamp(_LIMITS.min, _LIMITS.max).to(torch.int32)
    return x.contiguous()
