"""Matrix products whose dtype is chosen by the caller, not by autocast.

Autocast does not change torch's products with `out`. On CUDA the product of 16-bit factors can be
summed and written in float32, without rounding to 16 bits.
"""

from __future__ import annotations

from functools import cache, reduce

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


def is_autocast_enabled(x: Tensor) -> bool:
    """Whether autocast is on for the device of x, which may be meta."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def product_dtype(*factors: Tensor) -> torch.dtype:
    """The dtype of products of these: autocast's, or the widest of theirs."""
    if is_autocast_enabled(factors[0]) and factors[0].dtype != torch.float64:
        return torch.get_autocast_dtype(factors[0].device.type)
    return reduce(torch.promote_types, [x.dtype for x in factors])


def can_multiply_first_rows(x: Tensor) -> bool:
    """True if multiply_first_rows takes factors of x's dtype on its device without waiting: where
    torch has grouped products whose sizes are on the device (bfloat16, from compute capability 9
    on)."""
    return x.is_cuda and x.dtype == torch.bfloat16 and _has_grouped_products(x.device)


@cache
def _has_grouped_products(device: torch.device) -> bool:
    has_function = hasattr(torch.nn.functional, "grouped_mm")
    return has_function and torch.cuda.get_device_capability(device)[0] >= 9


def multiply_first_rows(a: Tensor, b: Tensor, count: Tensor) -> Tensor:
    """(R,n) = a (R,m) times b (m,n) for the first `count` (1,) int32 rows, a number that only the
    device knows; the other rows are undefined."""
    if a.is_cuda:
        return torch.nn.functional.grouped_mm(a, b[None], offs=count)
    out = a.new_empty((a.shape[0], b.shape[1]))
    multiply_into(out[: int(count)], a[: int(count)], b)
    return out


def row_block_products(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """(G,m,n): the product of a (R,m), transposed, and b (R,n) over each block of rows. ends (G,)
    int32: the row behind each block, of which the first begins at row 0."""
    if a.is_cuda:
        return torch.nn.functional.grouped_mm(a.t(), b, offs=ends)
    blocks = zip([0, *ends.tolist()[:-1]], ends.tolist(), strict=True)
    return torch.stack([a[begin:end].t() @ b[begin:end] for begin, end in blocks])
