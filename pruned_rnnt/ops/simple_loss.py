"""The loss of the trivial joiner: matrix products around simple_log_probs and band_lattice.

Axes: N batch, T frames, U symbols, V vocabulary. The maths is in simple_log_probs.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops._library import accumulator
from pruned_rnnt.ops.row_geometry import RowGeometry
from pruned_rnnt.ops.row_loss import run_recursion
from pruned_rnnt.ops.second_derivative import refuses_second_derivative
from pruned_rnnt.ops.simple_log_probs import (
    exp_rows,
    simple_backward,
    simple_log_probs,
    simple_weights,
)

NEG_INF = float("-inf")


class SimpleOptions(NamedTuple):
    """Scales and penalties of the simple loss; rnnt_type as in _library.RNNT_TYPES."""

    blank: int
    rnnt_type: int
    lm_only_scale: float
    am_only_scale: float
    delay_penalty: float
    fastemit_lambda: float


class SimpleLogProbs(NamedTuple):
    """px, py (N,T,U+1) and what the backward pass needs beside them."""

    px: Tensor
    py: Tensor
    am_exp: Tensor
    lm_exp: Tensor
    product: Tensor
    logz: Tensor
    lm_lse: Tensor | None
    am_lse: Tensor | None
    log_q: Tensor | None


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a (N,I,K) times b (N,K,J). torch.bmm with `out` is out of reach of autocast, which would
    round the accumulator's float32 to 16 bits."""
    out = a.new_empty((a.shape[0], a.shape[1], b.shape[2]))
    torch.bmm(a, b, out=out)
    return out


def _counted_rows(lm_log_softmax: Tensor, target_lengths: Tensor) -> Tensor:
    """(N,U+1) bool: positions that q is the mean of. A NaN would spread over the batch."""
    u = torch.arange(lm_log_softmax.shape[1], device=lm_log_softmax.device)
    return (u <= target_lengths[:, None]) & ~lm_log_softmax[:, :, 0].isnan()


def _log_unigram(lm: Tensor, target_lengths: Tensor) -> Tensor:
    """log q (V): q is the mean of softmax(lm) over real positions; exact where q underflows."""
    log_softmax = torch.log_softmax(lm.to(accumulator(lm.dtype)), dim=2)
    counted = _counted_rows(log_softmax, target_lengths)
    log_softmax = log_softmax.masked_fill(~counted[:, :, None], NEG_INF)
    return torch.logsumexp(log_softmax, dim=(0, 1)) - counted.sum().log()


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
    batch, frames, _ = am.shape
    width = lm.shape[1]
    am_max, am_exp = am.new_empty((batch, frames), dtype=acc), torch.empty_like(am, dtype=acc)
    lm_max, lm_exp = lm.new_empty((batch, width), dtype=acc), torch.empty_like(lm, dtype=acc)
    exp_rows(am, logit_lengths, 0, am_max, am_exp)
    exp_rows(lm, target_lengths, 1, lm_max, lm_exp)
    product = _product(am_exp, lm_exp.transpose(1, 2))
    lm_lse = am_lse = log_q = None
    if options.lm_only_scale != 0:
        lm_lse = lm_exp.sum(2).log_().add_(lm_max)
    if options.am_only_scale != 0:
        log_q = _log_unigram(lm, target_lengths)
        am_lse = torch.logsumexp(am.to(acc) + log_q, dim=2)
    px, py = product.new_empty((2, *product.shape)).unbind(0)
    logz = torch.empty_like(product)
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
    return SimpleLogProbs(px, py, am_exp, lm_exp, product, logz, lm_lse, am_lse, log_q)


def _unigram_gradient(
    grad_loss: Tensor,
    gx: Tensor,
    gy: Tensor,
    am: Tensor,
    lm: Tensor,
    am_lse: Tensor,
    log_q: Tensor,
    targets: Tensor,
    target_lengths: Tensor,
    options: SimpleOptions,
) -> Tensor:
    """The share of d lm (N,U+1,V) that goes through log q, in acc. A NaN in an utterance counts as
    no gradient here, or it would reach the others."""
    acc = log_q.dtype
    ex = gx * ((1 + options.fastemit_lambda) * grad_loss)[:, None, None]
    ey = gy * grad_loss[:, None, None]
    broken_N = (ex + ey).sum((1, 2)).isnan()[:, None, None]
    ex, ey = ex.masked_fill(broken_N, 0), ey.masked_fill(broken_N, 0)
    leaving_NT = (ex + ey).sum(2)
    softmax = (am.to(acc) + log_q - am_lse[:, :, None]).exp()
    softmax = softmax.masked_fill((leaving_NT == 0)[:, :, None], 0)
    grad_log_q = torch.mv(softmax.flatten(0, 1).t(), leaving_NT.flatten())
    emitted_NU = ex.sum(1)[:, :-1]
    y = torch.where(emitted_NU != 0, targets, options.blank).long()
    grad_log_q.index_put_((y.flatten(),), -emitted_NU.flatten(), accumulate=True)
    grad_log_q[options.blank] -= ey.sum()

    log_softmax = torch.log_softmax(lm.to(acc), dim=2)
    counted = _counted_rows(log_softmax, target_lengths)
    # d log q(v) / d log softmax(u,v) is the share of position u in q(v).
    share = (log_softmax - log_q - counted.sum().log()).exp() * grad_log_q
    grad = share - log_softmax.exp() * share.sum(2, keepdim=True)
    return options.am_only_scale * grad.masked_fill(~counted[:, :, None], 0)


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
        frames, columns = parts.px.shape[1:]
        total, gx, gy = run_recursion(
            parts.px,
            parts.py,
            logit_lengths,
            target_lengths,
            RowGeometry(None, None, frames, columns),
            options.rnnt_type,
            options.delay_penalty,
        )
        ctx.save_for_backward(am, lm, targets, logit_lengths, target_lengths, gx, gy, *parts[2:])
        ctx.options = options
        ctx.mark_non_differentiable(gx, gy)
        return -total, gx, gy

    @staticmethod
    @refuses_second_derivative
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (am, lm, targets, logit_lengths, target_lengths, gx, gy, *parts) = ctx.saved_tensors
        am_exp, lm_exp, product, logz, lm_lse, am_lse, log_q = parts
        options: SimpleOptions = ctx.options
        grad_loss = grad_loss.to(product.dtype).contiguous()
        lengths = (logit_lengths, target_lengths)
        combined_scale = 1 - options.lm_only_scale - options.am_only_scale
        weights = torch.empty_like(product)
        fastemit = options.fastemit_lambda
        simple_weights(grad_loss, gx, gy, product, *lengths, combined_scale, fastemit, weights)
        am_sum = _product(weights, lm_exp)
        lm_sum = _product(weights.transpose(1, 2), am_exp)
        # Written over the sums where the dtype is theirs.
        in_acc = am.dtype == am_sum.dtype or log_q is not None
        grad_am, grad_lm = am_sum, lm_sum
        if not in_acc:
            grad_am, grad_lm = torch.empty_like(am), torch.empty_like(lm)
        simple_backward(
            grad_loss,
            gx,
            gy,
            am,
            lm,
            am_exp,
            lm_exp,
            product,
            logz,
            am_sum,
            lm_sum,
            lm_lse,
            am_lse,
            log_q,
            targets,
            *lengths,
            options.blank,
            options.lm_only_scale,
            options.am_only_scale,
            fastemit,
            grad_am,
            grad_lm,
        )
        if log_q is not None:
            grad_lm = grad_lm + _unigram_gradient(
                grad_loss, gx, gy, am, lm, am_lse, log_q, targets, target_lengths, options
            )
        return grad_am.to(am.dtype), grad_lm.to(lm.dtype), None, None, None, None


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
