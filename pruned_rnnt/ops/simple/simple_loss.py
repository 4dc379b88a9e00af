"""The loss of the trivial joiner: matrix products around simple_log_probs and band_lattice.

The maths is in simple_log_probs.py, how exponentials are stored in simple_products.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.autograd import refuses_second_derivative, with_occupancies
from pruned_rnnt.ops.common.library import accumulator
from pruned_rnnt.ops.common.opaque import opaque_to_compile
from pruned_rnnt.ops.common.row_geometry import LatticeRows
from pruned_rnnt.ops.common.utterances import TargetsAndLengths
from pruned_rnnt.ops.joiner.row_loss import LossOptions, run_recursion
from pruned_rnnt.ops.simple.simple_log_probs import (
    NodeScores,
    Products,
    Scales,
    Smoothing,
    Upstream,
    simple_backward,
    simple_log_probs,
    simple_weights,
)
from pruned_rnnt.ops.simple.simple_products import (
    Exponentials,
    exp_layout,
    exp_rows,
    simple_product,
    simple_sums,
)
from pruned_rnnt.ops.simple.unigram_prior import log_unigram, unigram_gradient


class SimpleOptions(NamedTuple):
    """loss: of which the simple loss uses the topology and the penalties."""

    loss: LossOptions
    scales: Scales


class SimpleState(NamedTuple):
    """The results of the forward pass that the gradient needs."""

    exps: Exponentials
    product: Tensor
    logz: Tensor
    smoothing: Smoothing


def whole_lattices(am: Tensor, lm: Tensor, batch: TargetsAndLengths) -> LatticeRows:
    """The geometry of (N,T,U+1)."""
    return LatticeRows(*batch[1:], None, None, am.shape[1], lm.shape[1])


class RowExponentials(NamedTuple):
    """Maxima of the rows, am_max (N,T) and lm_max (N,U+1), lm_lse (N,U+1), and exponentials."""

    am_max: Tensor
    lm_max: Tensor
    lm_lse: Tensor
    exps: Exponentials


def row_exponentials(
    am: Tensor, lm: Tensor, batch: TargetsAndLengths, *, for_product: bool = True
) -> RowExponentials:
    """Of contiguous am (N,T,V) and lm (N,U+1,V); with what only the product needs, or not."""
    acc = accumulator(am.dtype)
    (utterances, frames, size), width = am.shape, lm.shape[1]
    layout = exp_layout(am.dtype, am.device)
    has_low = layout.split and (for_product or layout.weight_parts == 3)

    def exponentials(
        x: Tensor, lengths: Tensor, extra: int, rows: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        row_max, row_lse = x.new_empty((2, *x.shape[:2]), dtype=acc).unbind(0)
        high = x.new_empty((utterances, rows, layout.padded(size)), dtype=layout.dtype)
        low = torch.empty_like(high) if has_low else None
        exp_rows(x, lengths, extra, row_max, row_lse, high, low)
        return row_max, row_lse, high, low

    am_max, _, am_exp, am_low = exponentials(am, batch.logit_lengths, 0, frames)
    lm_max, lm_lse, lm_exp, lm_low = exponentials(lm, batch.target_lengths, 1, layout.padded(width))
    return RowExponentials(am_max, lm_max, lm_lse, Exponentials(am_exp, am_low, lm_exp, lm_low))


def simple_scores(
    am: Tensor, lm: Tensor, batch: TargetsAndLengths, options: SimpleOptions
) -> tuple[NodeScores, SimpleState]:
    """px and py (N,T,U+1) of contiguous am (N,T,V) and lm (N,U+1,V)."""
    acc = accumulator(am.dtype)
    am_max, lm_max, row_lse, exps = row_exponentials(am, lm, batch)
    product = am.new_empty((*am.shape[:2], exps.lm_exp.shape[1]), dtype=acc)
    simple_product(exps, product)
    if exp_layout(am.dtype, am.device).weight_parts == 1:
        exps = exps._replace(am_low=None, lm_low=None)
    am_lse = log_q = None
    if options.scales.am_only_scale != 0:
        log_q = log_unigram(lm, batch.target_lengths)
        am_lse = torch.logsumexp(am.to(acc) + log_q, dim=2)
    lm_lse = row_lse if options.scales.lm_only_scale != 0 else None
    smoothing = Smoothing(lm_lse, am_lse, log_q)
    scores = NodeScores(*am.new_empty((3, *am.shape[:2], lm.shape[1]), dtype=acc).unbind(0))
    simple_log_probs(am, lm, am_max, lm_max, product, smoothing, batch, options.scales, scores)
    return scores, SimpleState(exps, product, scores.logz, smoothing)


def simple_gradient(
    upstream: Upstream,
    am: Tensor,
    lm: Tensor,
    state: SimpleState,
    batch: TargetsAndLengths,
    options: SimpleOptions,
) -> tuple[Tensor, Tensor]:
    """The gradients of am and lm; in the dtype of am."""
    exps, product, _, smoothing = state
    scales, fastemit = options.scales, options.loss.fastemit_lambda
    layout = exp_layout(am.dtype, am.device)
    size, frames = am.shape[:2]
    columns, width = exps.lm_exp.shape[1:]
    weights = am.new_empty((size, frames, layout.weight_parts, columns), dtype=layout.dtype)
    simple_weights(upstream, product, *batch[1:], scales.combined, fastemit, weights)
    am_sum = torch.empty_like(exps.am_exp, dtype=layout.sum_dtype)
    lm_sum = torch.empty_like(exps.lm_exp, dtype=layout.sum_dtype)
    lm_stack = None
    if layout.weight_parts == 3:
        lm_stack = am.new_empty((size, 3 * columns, width), dtype=layout.dtype)
    simple_sums(weights, exps, lm_stack, am_sum, lm_sum)
    # Written over the sums if these have the same dtype and shape.
    in_place = am.dtype == accumulator(am.dtype)
    grad_am, grad_lm = (
        total if in_place and total.shape == x.shape else torch.empty_like(x)
        for total, x in ((am_sum, am), (lm_sum, lm))
    )
    kept = (exps, Products(product, state.logz, am_sum, lm_sum), smoothing, batch)
    simple_backward(upstream, am, lm, *kept, scales, fastemit, grad_am, grad_lm)
    if smoothing.log_q is not None:
        through_prior = unigram_gradient(upstream, am, lm, smoothing, batch, scales.blank, fastemit)
        grad_lm = grad_lm + scales.am_only_scale * through_prior
    return grad_am, grad_lm.to(lm.dtype)


class _SimpleLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, am: Tensor, lm: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        *tensors, ctx.options = arguments
        batch = TargetsAndLengths(*tensors)
        scores, state = simple_scores(am, lm, batch, ctx.options)
        rows = whole_lattices(am, lm, batch)
        total, gx, gy = run_recursion(scores.px, scores.py, rows, ctx.options.loss)
        exps, product, logz, smoothing = state
        ctx.save_for_backward(gx, gy, am, lm, *batch, product, logz, *exps, *smoothing)
        return with_occupancies(ctx, -total, gx, gy)

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        gx, gy, am, lm, *saved = ctx.saved_tensors
        batch = TargetsAndLengths(*saved[:3])
        product, logz, *parts = saved[3:]
        state = SimpleState(Exponentials(*parts[:4]), product, logz, Smoothing(*parts[4:]))
        upstream = Upstream(grad_loss.to(gx.dtype).contiguous(), gx, gy)
        return *simple_gradient(upstream, am, lm, state, batch, ctx.options), *[None] * 4


@opaque_to_compile
def simple_loss(
    am_NTV: Tensor, lm_NUV: Tensor, batch: TargetsAndLengths, options: SimpleOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss (N,), gx, gy (N,T,U+1) of contiguous am and lm of one dtype; all in acc.

    The loss is differentiable in am and lm, the occupancies are not.
    """
    loss, gx, gy = _SimpleLoss.apply(am_NTV, lm_NUV, *batch, options)  # type: ignore[no-untyped-call]
    return loss, gx, gy
