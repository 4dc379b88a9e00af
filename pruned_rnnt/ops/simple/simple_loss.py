"""The loss of the trivial joiner: matrix products around simple_log_probs and band_lattice.

Axes: N batch, T frames, U symbols, V vocabulary. The maths is in simple_log_probs.py, how
exponentials are stored in simple_products.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import accumulator, opaque_to_compile
from pruned_rnnt.ops.common.row_geometry import RowGeometry
from pruned_rnnt.ops.common.second_derivative import refuses_second_derivative
from pruned_rnnt.ops.joiner.row_loss import Recursion, run_recursion
from pruned_rnnt.ops.simple.simple_log_probs import (
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
    """px, py (N,T,U+1) and what the gradient needs beside them."""

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
    batch, frames, size = am.shape
    width = lm.shape[1]
    layout = exp_layout(am.dtype, am.device)

    def exponentials(
        x: Tensor, lengths: Tensor, extra: int, rows: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        row_max, row_lse = x.new_empty((2, *x.shape[:2]), dtype=acc).unbind(0)
        high = x.new_empty((batch, rows, layout.padded(size)), dtype=layout.dtype)
        low = torch.empty_like(high) if layout.split else None
        exp_rows(x, lengths, extra, row_max, row_lse, high, low)
        return row_max, row_lse, high, low

    am_max, _, am_exp, am_low = exponentials(am, logit_lengths, 0, frames)
    lm_max, row_lse, lm_exp, lm_low = exponentials(lm, target_lengths, 1, layout.padded(width))
    product = am.new_empty((batch, frames, layout.padded(width)), dtype=acc)
    px, py, logz = am.new_empty((3, batch, frames, width), dtype=acc).unbind(0)
    simple_product(am_exp, am_low, lm_exp, lm_low, product)
    lm_lse = row_lse if options.lm_only_scale != 0 else None
    am_lse = log_q = None
    if options.am_only_scale != 0:
        log_q = log_unigram(lm, target_lengths)
        am_lse = torch.logsumexp(am.to(acc) + log_q, dim=2)
    simple_log_probs(
        am,
        lm,
        am_max,
        lm_max,
        product,
        lm_lse,
        am_lse,
        log_q,
        targets,
        logit_lengths,
        target_lengths,
        options.blank,
        options.lm_only_scale,
        options.am_only_scale,
        px,
        py,
        logz,
    )
    if layout.weight_parts == 1:
        am_low = lm_low = None
    return SimpleLogProbs(
        px, py, am_exp, am_low, lm_exp, lm_low, product, logz, lm_lse, am_lse, log_q
    )


def simple_recursion(
    parts: SimpleLogProbs, logit_lengths: Tensor, target_lengths: Tensor, options: SimpleOptions
) -> Recursion:
    """total (N,), gx, gy (N,T,U+1) of the whole lattice."""
    frames, columns = parts.px.shape[1:]
    return run_recursion(
        parts.px,
        parts.py,
        logit_lengths,
        target_lengths,
        RowGeometry(None, None, frames, columns),
        options.rnnt_type,
        options.delay_penalty,
    )


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
    lengths = (logit_lengths, target_lengths)
    layout = exp_layout(am.dtype, am.device)
    batch, frames, _ = am.shape
    shape = (batch, frames, layout.weight_parts, parts.lm_exp.shape[1])
    weights = am.new_empty(shape, dtype=layout.dtype)
    combined_scale, fastemit = 1 - options.lm_only_scale - options.am_only_scale, options[-1]
    product = parts.product
    simple_weights(grad_loss, gx, gy, product, *lengths, combined_scale, fastemit, weights)
    exponentials = parts[2:6]
    am_sum = torch.empty_like(parts.am_exp, dtype=layout.sum_dtype)
    lm_sum = torch.empty_like(parts.lm_exp, dtype=layout.sum_dtype)
    scratch = None
    if layout.weight_parts == 3:
        rows = (batch, 3 * parts.lm_exp.shape[1], parts.lm_exp.shape[2])
        scratch = am.new_empty(rows, dtype=layout.dtype)
    simple_sums(weights, *exponentials, scratch, am_sum, lm_sum)
    # Written over the sums where these have the dtype and the shape.
    in_place = am.dtype == accumulator(am.dtype)
    grad_am, grad_lm = (
        total if in_place and total.shape == x.shape else torch.empty_like(x)
        for total, x in ((am_sum, am), (lm_sum, lm))
    )
    smoothing = (parts.lm_lse, parts.am_lse, parts.log_q)
    scales = (options.blank, options.lm_only_scale, options.am_only_scale, fastemit)
    simple_backward(
        grad_loss,
        gx,
        gy,
        am,
        lm,
        *exponentials,
        product,
        parts.logz,
        am_sum,
        lm_sum,
        *smoothing,
        targets,
        *lengths,
        *scales,
        grad_am,
        grad_lm,
    )
    if parts.am_lse is not None and parts.log_q is not None:
        through_prior = unigram_gradient(
            grad_loss,
            gx,
            gy,
            am,
            lm,
            parts.am_lse,
            parts.log_q,
            targets,
            target_lengths,
            options.blank,
            fastemit,
        )
        grad_lm = grad_lm + options.am_only_scale * through_prior
    return grad_am, grad_lm.to(lm.dtype)


class _SimpleLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        am: Tensor,
        lm: Tensor,
        targets: Tensor,
        logit_lengths: Tensor,
        target_lengths: Tensor,
        options: SimpleOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = simple_joiner_log_probs(am, lm, targets, logit_lengths, target_lengths, options)
        total, gx, gy = simple_recursion(parts, logit_lengths, target_lengths, options)
        ctx.save_for_backward(am, lm, targets, logit_lengths, target_lengths, gx, gy, *parts[2:])
        ctx.options = options
        ctx.mark_non_differentiable(gx, gy)
        # Else autograd fills zeros as large as these.
        ctx.set_materialize_grads(False)
        return -total, gx, gy

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad_loss is None:
            return (None,) * 6
        am, lm, targets, logit_lengths, target_lengths, gx, gy, *rest = ctx.saved_tensors
        grad_am, grad_lm = simple_gradient(
            grad_loss.to(gx.dtype).contiguous(),
            gx,
            gy,
            am,
            lm,
            SimpleLogProbs(gx, gy, *rest),  # px and py themselves are not needed any more
            targets,
            logit_lengths,
            target_lengths,
            ctx.options,
        )
        return grad_am, grad_lm, None, None, None, None


@opaque_to_compile
def simple_loss(
    am_NTV: Tensor,
    lm_NUV: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    options: SimpleOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss (N,), gx, gy (N,T,U+1) of contiguous am and lm of one dtype; all in acc.

    The loss is differentiable in am and lm, the occupancies are not.
    """
    loss, gx, gy = _SimpleLoss.apply(  # type: ignore[no-untyped-call]
        am_NTV, lm_NUV, targets, logit_lengths, target_lengths, options
    )
    return loss, gx, gy
