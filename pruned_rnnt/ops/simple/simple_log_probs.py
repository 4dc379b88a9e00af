"""Log-probabilities of the trivial joiner, am(t,v) + lm(u,v), without the 4-D tensor.

With am_max = max_v am and am_exp = exp(am - am_max), the same for lm,
    product(t,u) = sum_v am_exp(t,v) lm_exp(u,v)         a matrix product (simple_products.py)
    logz(t,u)    = log product + am_max(t) + lm_max(u)   where product >= SAFE,
                   log sum_v exp(am(t,v) + lm(u,v))      elsewhere: there the terms have
                   underflowed, and the sum is taken entry by entry over V.
SAFE is so far above the smallest normal number that terms which underflowed cannot change a sum
of SAFE or more.

With l = lm_only_scale, a = am_only_scale, c = 1 - l - a, and for v = y(u+1) (px) or blank (py):
    p(t,u) = c (am(t,v) + lm(u,v) - logz(t,u)) + l (lm(u,v) - lm_lse(u))
           + a (am(t,v) + log_q(v) - am_lse(t))
A summand whose scale is 0 is left out (its tensors are None); if logz is -inf, px = py = -inf.

Gradients, with ex = (1 + fastemit_lambda) gx and g = grad_loss of the utterance (loss = -log P):
    weights(t,u) = g c (ex + gy)(t,u) / product(t,u), 0 where product < SAFE
    am_sum = weights . lm_exp, lm_sum = weights^T . am_exp               matrix products again
    d am(t,v) = am_exp(t,v) am_sum(t,v)
              + sum over u with product(t,u) < SAFE of g c (ex + gy) exp(am(t,v) + lm(u,v) - logz)
              + a g (sum_u ex + gy)(t) exp(am(t,v) + log_q(v) - am_lse(t))
              - (c + a) g (sum_u ex(t,u) [v = y(u+1)] + [v = blank] sum_u gy(t,u))
    d lm(u,v) = lm_exp(u,v) lm_sum(u,v)
              + sum over t with product(t,u) < SAFE of g c (ex + gy) exp(am(t,v) + lm(u,v) - logz)
              + l g (sum_t ex + gy)(u) exp(lm(u,v) - lm_lse(u))
              - (c + l) g ([v = y(u+1)] sum_t ex(t,u) + [v = blank] sum_t gy(t,u))
(the share of d lm through log_q is added by the caller). Rows of padding get exact zeros, whatever
values they have. Entries with ex + gy = 0 contribute nothing and are not read, nor are rows of such
entries: a row of nothing but -inf has no softmax.
Source: arXiv 2206.13236, with the exact entries added.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pruned_rnnt.ops.common.library import NEG_INF, Out, op
from pruned_rnnt.ops.common.utterances import TargetsAndLengths

# Entries of (R, V) expanded at a time where the product underflowed.
_EXACT_ELEMENTS = 1 << 22


class Smoothing(NamedTuple):
    """lm_lse (N,U+1), am_lse (N,T) and log_q (V), acc; None where the scale is 0."""

    lm_lse: Tensor | None
    am_lse: Tensor | None
    log_q: Tensor | None


class NodeScores(NamedTuple):
    """(N,T,U+1) acc each."""

    px: Tensor
    py: Tensor
    logz: Tensor


class RowMaxima(NamedTuple):
    """am_max (N,T) and lm_max (N,U+1), acc."""

    am_max: Tensor
    lm_max: Tensor


class Scales(NamedTuple):
    """The blank, and the two scales of smoothing."""

    blank: int
    lm_only_scale: float
    am_only_scale: float

    @property
    def combined(self) -> float:
        """c of the module docstring."""
        return 1 - self.lm_only_scale - self.am_only_scale


class Upstream(NamedTuple):
    """grad_loss (N) and the occupancies gx, gy (N,T,U+1), acc."""

    grad_loss: Tensor
    gx: Tensor
    gy: Tensor


class Products(NamedTuple):
    """product (N,T,U'), logz (N,T,U+1), am_sum (N,T,V') and lm_sum (N,U',V'), acc."""

    product: Tensor
    logz: Tensor
    am_sum: Tensor
    lm_sum: Tensor


def safe_product(dtype: torch.dtype) -> float:
    """SAFE of the module docstring for an accumulator dtype."""
    return 1e-280 if dtype == torch.float64 else 1e-28


def _inside(
    logit_lengths: Tensor, target_lengths: Tensor, shape: torch.Size
) -> tuple[Tensor, Tensor]:
    """t < T_n, (N,T,1) bool, and u <= U_n, (N,1,U+1), for a shape (N,T,U+1)."""
    t = torch.arange(shape[1], device=logit_lengths.device)
    u = torch.arange(shape[2], device=logit_lengths.device)
    return t[:, None] < logit_lengths[:, None, None], u <= target_lengths[:, None, None]


def _pieces(entries: Tensor, vocabulary: int) -> Iterator[tuple[Tensor, ...]]:
    """Indices (n, t, u) of entries (E,3), so many at a time that (piece, V) is small."""
    for piece in entries.split(max(1, _EXACT_ELEMENTS // vocabulary)):
        yield piece.unbind(1)


def _symbols(targets: Tensor, blank: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Targets (N,U+1) int64 with blank in the last column and out-of-range symbols, and a mask of
    the columns with a usable symbol."""
    y = pad(targets, (0, 1), value=-1).long()
    usable = (y >= 0) & (y < vocabulary) & (y != blank)
    return torch.where(usable, y, blank), usable


@op
def simple_log_probs(
    am: Tensor,
    lm: Tensor,
    maxima: RowMaxima,
    product: Tensor,
    smoothing: Smoothing,
    batch: TargetsAndLengths,
    scales: Scales,
    out: Out[NodeScores],
) -> None:
    """am (N,T,V), lm (N,U+1,V) of one dtype; product (N,T,U') acc; targets (N,U), lengths (N)
    int32.

    px is -inf in column U_n; on invalid nodes (t >= T_n or u > U_n) px = py = -inf and logz = 0. A
    target outside 0..V-1 or equal to blank is unreachable (px = -inf), and never read; T_n > T or
    U_n > U makes the whole utterance invalid.
    """
    (lm_lse, am_lse, log_q), acc = smoothing, product.dtype
    targets, logit_lengths, target_lengths = batch
    blank, lm_only_scale, am_only_scale = scales
    (_, frames, vocabulary), width = am.shape, lm.shape[1]
    product = product[:, :, :width]
    inside_NT1, inside_N1U = _inside(logit_lengths, target_lengths, product.shape)
    fits_N = (logit_lengths <= frames) & (target_lengths < width)
    valid = inside_NT1 & inside_N1U & fits_N[:, None, None]
    safe = product >= safe_product(acc)
    z = product.clamp_min(safe_product(acc)).log()
    z += maxima.am_max[:, :, None] + maxima.lm_max[:, None, :]
    z.masked_fill_(~valid, 0)
    entries = (valid & ~safe).nonzero()
    for n, t, u in _pieces(entries, vocabulary):
        z[n, t, u] = torch.logsumexp(am[n, t].to(acc) + lm[n, u].to(acc), dim=-1)
    z.masked_fill_(z == torch.inf, torch.nan)  # after +inf, no probability is right
    out.logz.copy_(z)

    y_NU, usable_NU = _symbols(targets, blank, vocabulary)
    y_NTU = y_NU[:, None, :].expand(-1, frames, width)
    am_x, am_y = am.gather(2, y_NTU).to(acc), am[:, :, blank, None].to(acc)
    lm_x = lm.gather(2, y_NU[:, :, None]).to(acc)[:, None, :, 0]
    lm_y = lm[:, None, :, blank].to(acc)
    log_x, log_y = torch.zeros_like(z), torch.zeros_like(z)
    if scales.combined != 0:
        log_x += scales.combined * (am_x + lm_x - z)
        log_y += scales.combined * (am_y + lm_y - z)
    if lm_lse is not None:
        log_x += lm_only_scale * (lm_x - lm_lse[:, None, :])
        log_y += lm_only_scale * (lm_y - lm_lse[:, None, :])
    if am_lse is not None and log_q is not None:
        log_x += am_only_scale * (am_x + log_q[y_NU][:, None, :] - am_lse[:, :, None])
        log_y += am_only_scale * (am_y + log_q[blank] - am_lse[:, :, None])
    impossible = ~valid | (z == NEG_INF)
    u = torch.arange(width, device=am.device)
    emits_NU = usable_NU & (u < target_lengths[:, None])
    out.px.copy_(log_x.masked_fill_(impossible | ~emits_NU[:, None, :], NEG_INF))
    out.py.copy_(log_y.masked_fill_(impossible, NEG_INF))


@op
def simple_weights(
    upstream: Upstream,
    product: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    scale: float,
    fastemit_lambda: float,
    weights: Out[Tensor],
) -> None:
    """weights of the module docstring, (N,T,parts,U') of the dtype of the exponentials: one part,
    or high, high, low; scale is c. 0 on invalid nodes, where ex + gy = 0, and beyond
    U+1."""
    grad_loss, gx, gy = upstream
    columns = gx.shape[2]
    product = product[:, :, :columns]
    leaving = gx * (1 + fastemit_lambda) + gy
    inside_NT1, inside_N1U = _inside(logit_lengths, target_lengths, product.shape)
    used = inside_NT1 & inside_N1U & (product >= safe_product(product.dtype)) & (leaving != 0)
    value = (leaving * (scale * grad_loss)[:, None, None] / product).masked_fill_(~used, 0)
    weights.zero_()[:, :, 0, :columns] = value
    if weights.shape[2] == 3:
        high = weights[:, :, 0]
        weights[:, :, 1] = high
        weights[:, :, 2, :columns] = value - high[:, :, :columns].to(value.dtype)


def _times_sum(x: Tensor, row_max: Tensor, x_sum: Tensor) -> Tensor:
    """exp(x - row_max) times its sum, which is stored with padding."""
    _, count, vocabulary = x.shape
    exponentials = (x.to(row_max.dtype) - row_max[:, :, None]).exp()
    return exponentials * x_sum[:, :count, :vocabulary]


@op
def simple_backward(
    upstream: Upstream,
    am: Tensor,
    lm: Tensor,
    maxima: RowMaxima,
    products: Products,
    smoothing: Smoothing,
    batch: TargetsAndLengths,
    scales: Scales,
    fastemit_lambda: float,
    grad_am: Out[Tensor],
    grad_lm: Out[Tensor],
) -> None:
    """grad_am (N,T,V) and grad_lm (N,U+1,V) have the dtype of am. If that is also the dtype of the
    sums, they may be am_sum and lm_sum themselves, where these have no padding. The result is the
    same from run to run on every device."""
    grad_loss, gx, gy = upstream
    product, logz, am_sum, lm_sum = products
    (lm_lse, am_lse, log_q), acc = smoothing, product.dtype
    targets, logit_lengths, target_lengths = batch
    blank, lm_only_scale, am_only_scale = scales
    _, frames, vocabulary = am.shape
    product = product[:, :, : lm.shape[1]]
    inside_NT1, inside_N1U = _inside(logit_lengths, target_lengths, product.shape)
    valid = inside_NT1 & inside_N1U
    ex = (gx * ((1 + fastemit_lambda) * grad_loss)[:, None, None]).masked_fill_(~valid, 0)
    ey = (gy * grad_loss[:, None, None]).masked_fill_(~valid, 0)
    leaving = ex + ey
    d_am = _times_sum(am, maxima.am_max, am_sum)
    d_lm = _times_sum(lm, maxima.lm_max, lm_sum)

    if scales.combined != 0:
        unsafe = (leaving != 0) & ~(product >= safe_product(acc))
        for n, t, u in _pieces(unsafe.nonzero(), vocabulary):
            share = (am[n, t].to(acc) + lm[n, u].to(acc) - logz[n, t, u][:, None]).exp()
            share *= scales.combined * leaving[n, t, u][:, None]
            d_am.index_put_((n, t), share, accumulate=True)
            d_lm.index_put_((n, u), share, accumulate=True)

    if am_lse is not None and log_q is not None:
        leaving_NT1 = leaving.sum(2)[:, :, None]
        softmax = (am.to(acc) + log_q - am_lse[:, :, None]).exp()
        d_am += am_only_scale * (leaving_NT1 * softmax).masked_fill(leaving_NT1 == 0, 0)
    if lm_lse is not None:
        leaving_NU1 = leaving.sum(1)[:, :, None]
        softmax = (lm.to(acc) - lm_lse[:, :, None]).exp()
        d_lm += lm_only_scale * (leaving_NU1 * softmax).masked_fill(leaving_NU1 == 0, 0)

    y_NU, usable_NU = _symbols(targets, blank, vocabulary)
    ex = ex.masked_fill_(~usable_NU[:, None, :], 0)
    am_scale, lm_scale = scales.combined + am_only_scale, scales.combined + lm_only_scale
    d_am.scatter_add_(2, y_NU[:, None, :].expand(-1, frames, -1), -am_scale * ex)
    d_am[:, :, blank] -= am_scale * ey.sum(2)
    d_lm.scatter_add_(2, y_NU[:, :, None], -lm_scale * ex.sum(1)[:, :, None])
    d_lm[:, :, blank] -= lm_scale * ey.sum(1)

    grad_am.copy_(d_am.masked_fill_(~inside_NT1, 0))
    grad_lm.copy_(d_lm.masked_fill_(~inside_N1U.mT, 0))
