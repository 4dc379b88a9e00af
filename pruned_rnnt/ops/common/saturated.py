"""Integers of either size as int32, the size that the kernels read."""

from __future__ import annotations

import torch
from torch import Tensor

_LIMITS = torch.iinfo(torch.int32)


def as_int32(x: Tensor) -> Tensor:
    """x as contiguous int32 on its device. What does not fit becomes the largest or smallest int32,
    which is as far out of range: cut to its low bits it could look like a length or a symbol."""
    if x.dtype != torch.int32:
        x = x.clamp(_LIMITS.min, _LIMITS.max).to(torch.int32)
    return x.contiguous()
