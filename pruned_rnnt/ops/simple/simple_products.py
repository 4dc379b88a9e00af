"""How the exponentials of the trivial joiner are stored, and the matrix products of them.

V' and U' are V and U+1 rounded up to a multiple that makes products fast, and padded with zeros.

Where 16-bit matrix products are several times faster than those of float32 (CUDA from compute
capability 8.0 on), an exponential e is stored as bfloat16 parts, high = bf16(e) and
low = bf16(e - high): together they keep 16 bits and the whole range of float32. Then

    product = high high^T + high low^T + low high^T                  relative error below 2^-16

with sums in float32. The gradient's products (simple_log_probs.py) of float32 inputs are made of
the same three terms, their weights in parts too; those of 16-bit inputs take the high parts alone,
for their results are rounded to 16 bits anyway. On other devices, and in float64, e is stored
unchanged in one part.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import NEG_INF, Out, accumulator, op
from pruned_rnnt.ops.common.matrix_products import multiply_into


class Exponentials(NamedTuple):
    """am (N,T,V') and lm (N,U',V') with their low parts, if they have these."""

    am_exp: Tensor
    am_low: Tensor | None
    lm_exp: Tensor
    lm_low: Tensor | None


class ExpLayout(NamedTuple):
    """dtype of exponentials and weights; split: whether they have a low part; multiple: of V' and
    U'; weight_parts: 1, or 3 for high, high, low; sum_dtype: that of the gradient's products."""

    dtype: torch.dtype
    split: bool
    multiple: int
    weight_parts: int
    sum_dtype: torch.dtype

    def padded(self, size: int) -> int:
        return -(-size // self.multiple) * self.multiple


def exp_layout(dtype: torch.dtype, device: torch.device) -> ExpLayout:
    """The layout for inputs of that dtype on that device."""
    acc = accumulator(dtype)
    if acc == torch.float64 or device.type != "cuda" or not _fast_bfloat16(device.index):
        return ExpLayout(acc, False, 1, 1, acc)
    if dtype == torch.float32:
        return ExpLayout(torch.bfloat16, True, 8, 3, acc)
    return ExpLayout(torch.bfloat16, True, 8, 1, torch.bfloat16)


@lru_cache
def _fast_bfloat16(device: int) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)


@op
def exp_rows(
    x: Tensor,
    lengths: Tensor,
    extra: int,
    row_max: Out[Tensor],
    row_lse: Out[Tensor],
    x_exp: Out[Tensor],
    x_low: Out[Tensor | None],
) -> None:
    """x (N,L,V) any dtype, lengths (N) int32 -> row_max, row_lse (N,L) acc: maximum and log-sum-exp
    of the row; x_exp (N,L',V') and, if not None, x_low of the same shape and dtype: exp(x -
    row_max), zeros beyond L and V. Rows from lengths[n] + extra on are padding: 0 everywhere, and x
    is not read there. A row of nothing but -inf gives row_max 0, row_lse -inf and x_exp 0. NaN
    stays NaN."""
    count, size = x.shape[1:]
    outside = torch.arange(count, device=x.device) >= lengths[:, None] + extra
    rows = x.to(row_max.dtype).masked_fill(outside[:, :, None], 0)
    maximum = rows.amax(-1)
    maximum = maximum.masked_fill(maximum == NEG_INF, 0)
    exponentials = (rows - maximum[:, :, None]).exp().masked_fill_(outside[:, :, None], 0)
    row_max.copy_(maximum)
    row_lse.copy_((maximum + exponentials.sum(2).log()).masked_fill_(outside, 0))
    x_exp.zero_()[:, :count, :size] = exponentials
    if x_low is not None:
        rest = exponentials - x_exp[:, :count, :size].to(exponentials.dtype)
        x_low.zero_()[:, :count, :size] = rest


@op
def simple_product(exps: Exponentials, product: Out[Tensor]) -> None:
    """am_exp, am_low (N,T,V'), lm_exp, lm_low (N,U',V') of one dtype -> product (N,T,U') acc."""
    multiply_into(product, exps.am_exp, exps.lm_exp.mT)
    if exps.am_low is not None and exps.lm_low is not None:
        multiply_into(product, exps.am_exp, exps.lm_low.mT, add=True)
        multiply_into(product, exps.am_low, exps.lm_exp.mT, add=True)


@op
def simple_sums(
    weights: Tensor,
    exps: Exponentials,
    lm_stack: Out[Tensor | None],
    am_sum: Out[Tensor],
    lm_sum: Out[Tensor],
) -> None:
    """weights (N,T,parts,U') of the dtype of exps -> am_sum (N,T,V'), lm_sum (N,U',V'). lm_stack
    (N,3U',V') is workspace for three parts."""
    am_exp, am_low, lm_exp, lm_low = exps
    high = weights[:, :, 0].mT
    multiply_into(lm_sum, high, am_exp)
    if weights.shape[2] == 1:
        multiply_into(am_sum, weights[:, :, 0], lm_exp)
        return
    assert am_low is not None
    assert lm_low is not None
    assert lm_stack is not None
    # High, low, high on top of each other, to meet high, high, low of the weights in one product.
    torch.cat([lm_exp, lm_low, lm_exp], 1, out=lm_stack)
    multiply_into(am_sum, weights.flatten(2), lm_stack)
    multiply_into(lm_sum, high, am_low, add=True)
    multiply_into(lm_sum, weights[:, :, 2].mT, am_exp, add=True)
