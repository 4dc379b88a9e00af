"""How the exponentials of the trivial joiner are stored, and the matrix products of them.

V' and U' are V and U+1 rounded up to a multiple that makes products fast, and padded with zeros.

Where 16-bit matrix products are several times faster than those of float32 (CUDA from compute
capability 8.0 on), an exponential e is stored as bfloat16 parts, high = bf16(e) and
low = bf16(e - high): together they keep 16 bits and the whole range of float32. Weights of the
gradient's products (simple_log_probs.py) have two parts too. Then

    a b = high high + high low + low high                            relative error below 2^-16

with sums in float32. am has its parts one after the other; lm has high, low, high, so that high,
high, low of the weights meet them in one product. One part would not do even for 16-bit inputs: the
gradient is the difference of a softmax and an occupancy, which in a trained model are nearly equal,
and the error of one part, 2^-9 of either, is then many times that of rounding the difference to 16
bits. On other devices, and in float64, e is stored unchanged in one part.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import NEG_INF, Out, accumulator, op
from pruned_rnnt.ops.common.matrix_products import multiply_into

# The exponentials of am that one call of simple_sums reads. Smaller calls need less memory for sums
# but leave the GPU waiting for the host: with 32 MiB, V 10000 took 1.6 times as long.
TOGETHER_BYTES = 512 << 20


class Exponentials(NamedTuple):
    """am_exp (N,parts,T,V') and lm_exp (N,parts,U',V'): one part each, or high, low of am and high,
    low, high of lm."""

    am_exp: Tensor
    lm_exp: Tensor


class ExpLayout(NamedTuple):
    """dtype of exponentials and weights; split: whether they have parts; multiple: of V' and U'."""

    dtype: torch.dtype
    split: bool
    multiple: int

    @property
    def am_parts(self) -> int:
        return 2 if self.split else 1

    @property
    def lm_parts(self) -> int:
        """Parts of lm, and of the weights."""
        return 3 if self.split else 1

    def padded(self, width: int) -> int:
        return -(-width // self.multiple) * self.multiple

    def together(self, utterances: int, frames: int, vocabulary: int) -> int:
        """Utterances of one call of simple_sums, for am (N,T,V): at least one."""
        each = self.am_parts * frames * self.padded(vocabulary) * self.dtype.itemsize
        return max(1, min(utterances, TOGETHER_BYTES // max(each, 1)))


def exp_layout(dtype: torch.dtype, device: torch.device) -> ExpLayout:
    """The layout for inputs of that dtype on that device."""
    acc = accumulator(dtype)
    if acc == torch.float64 or device.type != "cuda" or not _fast_bfloat16(device.index):
        return ExpLayout(acc, False, 1)
    return ExpLayout(torch.bfloat16, True, 8)


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
) -> None:
    """x (N,L,V) any dtype, lengths (N) int32 -> row_max, row_lse (N,L) acc: maximum and log-sum-exp
    of the row; x_exp (N,parts,L',V'): exp(x - row_max), zeros beyond L and V, in one part, two
    (high, low) or three (high, low, high). Rows from lengths[n] + extra on are padding: 0
    everywhere, and x is not read there. A row of nothing but -inf gives row_max 0, row_lse -inf and
    x_exp 0. NaN stays NaN."""
    count, vocabulary = x.shape[1:]
    outside = torch.arange(count, device=x.device) >= lengths[:, None] + extra
    rows = x.to(row_max.dtype).masked_fill(outside[:, :, None], 0)
    maximum = rows.amax(-1)
    maximum = maximum.masked_fill(maximum == NEG_INF, 0)
    exponentials = (rows - maximum[:, :, None]).exp().masked_fill_(outside[:, :, None], 0)
    row_max.copy_(maximum)
    row_lse.copy_((maximum + exponentials.sum(2).log()).masked_fill_(outside, 0))
    high, *others = x_exp.zero_()[:, :, :count, :vocabulary].unbind(1)
    high.copy_(exponentials)
    for part, value in zip(
        others, (exponentials - high.to(exponentials.dtype), high), strict=False
    ):
        part.copy_(value)


@op
def simple_product(exps: Exponentials, product: Out[Tensor]) -> None:
    """product (N,T,U') acc."""
    am, lm = (x.unbind(1) for x in exps)
    multiply_into(product, am[0], lm[0].mT)
    if len(am) == 2:
        multiply_into(product, am[0], lm[1].mT, add=True)
        multiply_into(product, am[1], lm[0].mT, add=True)


@op
def simple_sums(
    weights: Tensor, exps: Exponentials, lm_sum: Out[Tensor], am_sum: Out[Tensor]
) -> None:
    """weights (N,T,parts,U') of the dtype of exps, with as many parts as lm: one, or high, high,
    low -> lm_sum (N,U',V'), am_sum (N,T,V') acc. The library writes am_sum last, when it has read
    am: it may be in the same memory."""
    am = exps.am_exp.unbind(1)
    high, low = weights[:, :, 0].mT, weights[:, :, -1].mT
    multiply_into(lm_sum, high, am[0])
    if len(am) == 2:
        multiply_into(lm_sum, high, am[1], add=True)
        multiply_into(lm_sum, low, am[0], add=True)
    multiply_into(am_sum, weights.flatten(2), exps.lm_exp.flatten(1, 2))
