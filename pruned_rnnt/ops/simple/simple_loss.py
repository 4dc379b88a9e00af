"""The loss of the trivial joiner: matrix products around simple_log_probs and band_lattice.

Axes: N batch, T frames, U symbols, V vocabulary. The maths is in simple_log_probs.py, how
exponentials are stored in simple_products.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import accumulator, opaque_to_compile
from pruned_rnnt.ops.common.row_geometry import LatticeRows
from pruned_rnnt.ops.common.second_derivative import refuses_second_derivative
from pruned_rnnt.ops.common.utterances import TargetsAndLengths
from pruned_rnnt.ops.joiner.row_loss import run_recursion
from pruned_rnnt.ops.simple.simple_log_probs import (
    Exponentials,
    Gradients,
    NodeScores,
    Scales,
    Smoothing,
    Sums,
    Upstream,
    exp_rows,
    simple_backward,
    simple_log_probs,
    simple_weights,
)
from pruned_rnnt.ops.simple.simple_products import exp_layout, simple_product, simple_sums
from pruned_rnnt.ops.simple.unigram_prior import log_unigram, unigram_gradient


class SimpleOptions(NamedTuple):
    """Scales and penalties of the simple loss; rnnt_type as in library.RNNT_TYPES."""

    blank: int
    rnnt_type: int
    lm_only_scale: float
    am_only_scale: float
    delay_penalty: float
    fastemit_lambda: float


class SimpleLogProbs(NamedTuple):
    """px, py (N,T,U+1), and the tensors of the forward pass that the gradient needs."""

    px: Tensor
    py: Tensor
    am_exp: Tensor
    am_low: Tensor | None
    lm_exp: Tensor
    lm_low: Tensor | None
    product: Tensor
    logz: Tensor
    lm_lse: Tensor | None
    am_lse: Tensor | None
    log_q: Tensor | None


def simple_joiner_log_probs(
    am: Tensor,
    lm: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    options: SimpleOptions,
) -> SimpleLogProbs:
    """px, py of contiguous am (N,T,V) and lm (N,U+1,V); not differentiable by itself."""
    acc = accumulator(am.dtype)
    (utterances, frames, size), width = am.shape, lm.shape[1]
    layout = exp_layout(am.dtype, am.device)

    def exponentials(
        x: Tensor, lengths: Tensor, extra: int, rows: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        row_max, row_lse = x.new_empty((2, *x.shape[:2]), dtype=acc).unbind(0)
        high = x.new_empty((utterances, rows, layout.padded(size)), dtype=layout.dtype)
        low = torch.empty_like(high) if layout.split else None
        exp_rows(x, lengths, extra, row_max, row_lse, high, low)
        return row_max, row_lse, high, low

    am_max, _, am_exp, am_low = exponentials(am, logit_lengths, 0, frames)
    lm_max, row_lse, lm_exp, lm_low = exponentials(lm, target_lengths, 1, layout.padded(width))
    product = am.new_empty((utterances, frames, layout.padded(width)), dtype=acc)
    simple_product(am_exp, am_low, lm_exp, lm_low, product)
    am_lse = log_q = None
    if options.am_only_scale != 0:
        log_q = log_unigram(lm, target_lengths)
        am_lse = torch.logsumexp(am.to(acc) + log_q, dim=2)
    smoothing = Smoothing(row_lse if options.lm_only_scale != 0 else None, am_lse, log_q)
    scores = NodeScores(*am.new_empty((3, utterances, frames, width), dtype=acc).unbind(0))
    batch = TargetsAndLengths(targets, logit_lengths, target_lengths)
    scales = Scales(options.blank, options.lm_only_scale, options.am_only_scale)
    simple_log_probs(am, lm, am_max, lm_max, product, smoothing, batch, scales, scores)
    if layout.weight_parts == 1:
        am_low = lm_low = None
    kept = (am_exp, am_low, lm_exp, lm_low, product, scores.logz)
    return SimpleLogProbs(scores.px, scores.py, *kept, *smoothing)


def simple_recursion(
    parts: SimpleLogProbs, logit_lengths: Tensor, target_lengths: Tensor, options: SimpleOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """total (N,), gx, gy (N,T,U+1) of the whole lattice."""
    rows = LatticeRows(logit_lengths, target_lengths, None, None, *parts.px.shape[1:])
    return run_recursion(parts.px, parts.py, rows, options.rnnt_type, options.delay_penalty)


def simple_gradient(
    grad_loss: Tensor,
    gx: Tensor,
    gy: Tensor,
    am: Tensor,
    lm: Tensor,
    parts: SimpleLogProbs,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    options: SimpleOptions,
) -> tuple[Tensor, Tensor]:
    """The gradients of am and lm, for grad_loss (N,) acc; in the dtype of am."""
    upstream = Upstream(grad_loss, gx, gy)
    batch = TargetsAndLengths(targets, logit_lengths, target_lengths)
    exps = Exponentials(parts.am_exp, parts.am_low, parts.lm_exp, parts.lm_low)
    smoothing = Smoothing(parts.lm_lse, parts.am_lse, parts.log_q)
    blank, _, lm_only_scale, am_only_scale, _, fastemit = options
    layout = exp_layout(am.dtype, am.device)
    size, frames = am.shape[:2]
    columns, width = exps.lm_exp.shape[1:]
    weights = am.new_empty((size, frames, layout.weight_parts, columns), dtype=layout.dtype)
    lengths, combined_scale = (logit_lengths, target_lengths), 1 - lm_only_scale - am_only_scale
    simple_weights(upstream, parts.product, *lengths, combined_scale, fastemit, weights)
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
    kept = (exps, parts.product, parts.logz, Sums(am_sum, lm_sum), smoothing, batch)
    scales = Scales(blank, lm_only_scale, am_only_scale)
    grads = Gradients(grad_am, grad_lm)
    simple_backward(upstream, am, lm, *kept, scales, fastemit, grads)
    if smoothing.log_q is not None:
        through_prior = unigram_gradient(upstream, am, lm, smoothing, batch, blank, fastemit)
        grad_lm = grad_lm + am_only_scale * through_prior
    return grad_am, grad_lm.to(lm.dtype)


class _SimpleLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, am: Tensor, lm: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        targets, logit_lengths, target_lengths, options = arguments
        lengths = (logit_lengths, target_lengths)
        parts = simple_joiner_log_probs(am, lm, targets, *lengths, options)
        total, gx, gy = simple_recursion(parts, *lengths, options)
        # The gradient does not need px and py; their fields hold the occupancies instead.
        ctx.save_for_backward(am, lm, targets, *lengths, *parts._replace(px=gx, py=gy))
        ctx.options = options
        ctx.mark_non_differentiable(gx, gy)
        # Otherwise autograd allocates gradients of zeros as large as these.
        ctx.set_materialize_grads(False)
        return -total, gx, gy

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad_loss is None:
            return (None,) * 6
        am, lm, targets, logit_lengths, target_lengths, *saved = ctx.saved_tensors
        parts = SimpleLogProbs(*saved)
        upstream = Upstream(grad_loss.to(parts.px.dtype).contiguous(), parts.px, parts.py)
        batch = (targets, logit_lengths, target_lengths)
        return *simple_gradient(*upstream, am, lm, parts, *batch, ctx.options), *[None] * 4


@opaque_to_compile
def simple_loss(
    am_NTV: Tensor, lm_NUV: Tensor, batch: TargetsAndLengths, options: SimpleOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss (N,), gx, gy (N,T,U+1) of contiguous am and lm of one dtype; all in acc.

    The loss is differentiable in am and lm, the occupancies are not.
    """
    loss, gx, gy = _SimpleLoss.apply(am_NTV, lm_NUV, *batch, options)  # type: ignore[no-untyped-call]
    return loss, gx, gy
