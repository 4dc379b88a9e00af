"""Matrix products whose dtype is chosen by the caller, not by autocast.

Autocast does not change torch's products with `out`. On CUDA the product of 16-bit factors can be
summed and written in float32, without rounding to 16 bits.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor


def multiply_into(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> Tensor:
    """out = a b, or with `add` out += a b; all 2-D, or all 3-D batches. Returns out.

    out has the dtype of a and b, or float32 (on the CPU also float64) for narrower ones.
    """
    batched = a.dim() == 3
    if a.dtype == out.dtype:
        if add:
            return (torch.baddbmm if batched else torch.addmm)(out, a, b, out=out)
        return (torch.bmm if batched else torch.mm)(a, b, out=out)
    if a.is_cuda:
        aten = torch.ops.aten
        if add:
            op = aten.baddbmm.dtype_out if batched else aten.addmm.dtype_out
            result: Tensor = op(out, a, b, out.dtype, out=out)
        else:
            op = aten.bmm.dtype_out if batched else aten.mm.dtype_out
            result = op(a, b, out.dtype, out=out)
        return result
    # The CPU has no product of mixed dtypes.
    return multiply_into(out, a.to(out.dtype), b.to(out.dtype), add=add)


def product_dtype(*factors: Tensor) -> torch.dtype:
    """The dtype of products of these: autocast's, or the widest of theirs."""
    device = factors[0].device.type
    if torch.is_autocast_enabled(device) and factors[0].dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return reduce(torch.promote_types, [x.dtype for x in factors])
