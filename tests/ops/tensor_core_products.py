"""What csrc/cuda/whole_lattice/float_product.cuh computes, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

# Elements of the sum of one instruction, and those between ordinary additions.
INSTRUCTION, RUN = 8, 16


def truncated(x: Tensor, bits: int) -> Tensor:
    """float32 x without its last bits."""
    return ((x.view(torch.int32) >> bits) << bits).view(torch.float32)


def rounded_to_zero(x: Tensor) -> Tensor:
    """float64 x as the float32 that is not larger in magnitude."""
    nearest = x.float()
    before = torch.nextafter(nearest, torch.zeros_like(nearest))
    return torch.where(nearest.double().abs() > x.abs(), before, nearest)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """The TF32 number nearest to float32 x, and the rest as a TF32 number."""
    bits = x.view(torch.int32)
    nearest_even = bits + 0x0FFF + ((bits >> 13) & 1)
    high = truncated(nearest_even.view(torch.float32), 13)
    return high, truncated(x - high, 13)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a (m,k) times b (k,n), both float32."""
    out = torch.zeros(a.shape[0], b.shape[1])
    for begin in range(0, a.shape[1], RUN):
        of_run = torch.zeros_like(out)
        groups = range(begin, min(begin + RUN, a.shape[1]), INSTRUCTION)
        parts = [(split(a[:, k : k + 8]), split(b[k : k + 8])) for k in groups]
        small = [pair for (ah, al), (bh, bl) in parts for pair in ((al, bh), (ah, bl))]
        for x, y in [*small, *((ah, bh) for (ah, _), (bh, _) in parts)]:
            of_run = rounded_to_zero(of_run.double() + x.double() @ y.double())
        out += of_run
    return out
