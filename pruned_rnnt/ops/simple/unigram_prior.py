"""The prior that smooths am: q, the mean of the predictor's softmax over all real positions."""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import NEG_INF, accumulator
from pruned_rnnt.ops.common.utterances import TargetsAndLengths
from pruned_rnnt.ops.simple.simple_log_probs import Smoothing, Upstream


def _counted_rows(lm_log_softmax: Tensor, target_lengths: Tensor) -> Tensor:
    """(N,U+1) bool: positions that q is the mean of; those of NaN would spread over the batch."""
    u = torch.arange(lm_log_softmax.shape[1], device=lm_log_softmax.device)
    return (u <= target_lengths[:, None]) & ~lm_log_softmax[:, :, 0].isnan()


def log_unigram(lm: Tensor, target_lengths: Tensor) -> Tensor:
    """log q (V): q is the mean of softmax(lm) over real positions; exact where q underflows."""
    log_softmax = torch.log_softmax(lm.to(accumulator(lm.dtype)), dim=2)
    counted = _counted_rows(log_softmax, target_lengths)
    log_softmax = log_softmax.masked_fill(~counted[:, :, None], NEG_INF)
    return torch.logsumexp(log_softmax, dim=(0, 1)) - counted.sum().log()


def unigram_gradient(
    upstream: Upstream,
    am: Tensor,
    lm: Tensor,
    smoothing: Smoothing,
    batch: TargetsAndLengths,
    blank: int,
    fastemit_lambda: float,
) -> Tensor:
    """The gradient of lm (N,U+1,V) through log q, in acc, for an am_only_scale of 1.

    Utterances with a NaN contribute none, because log q would pass it on to the others.
    """
    grad_loss, gx, gy = upstream
    _, am_lse, log_q = smoothing
    targets, _, target_lengths = batch
    assert am_lse is not None
    assert log_q is not None
    acc = log_q.dtype
    ex = gx * ((1 + fastemit_lambda) * grad_loss)[:, None, None]
    ey = gy * grad_loss[:, None, None]
    broken_N = (ex + ey).sum((1, 2)).isnan()[:, None, None]
    ex, ey = ex.masked_fill(broken_N, 0), ey.masked_fill(broken_N, 0)
    leaving_NT = (ex + ey).sum(2)
    softmax = (am.to(acc) + log_q - am_lse[:, :, None]).exp()
    softmax = softmax.masked_fill((leaving_NT == 0)[:, :, None], 0)
    # Autocast does not change products with `out`.
    grad_log_q = torch.empty_like(log_q)
    torch.mv(softmax.flatten(0, 1).t(), leaving_NT.flatten(), out=grad_log_q)
    emitted_NU = ex.sum(1)[:, :-1]
    y = torch.where(emitted_NU != 0, targets, blank).long()
    grad_log_q.index_put_((y.flatten(),), -emitted_NU.flatten(), accumulate=True)
    grad_log_q[blank] -= ey.sum()

    log_softmax = torch.log_softmax(lm.to(acc), dim=2)
    counted = _counted_rows(log_softmax, target_lengths)
    # d log q(v) / d log softmax(u,v) is the share of position u in q(v).
    share = (log_softmax - log_q - counted.sum().log()).exp() * grad_log_q
    # A symbol that no position allows has no share, and no gradient.
    share = share.masked_fill(log_softmax == NEG_INF, 0)
    grad = share - log_softmax.exp() * share.sum(2, keepdim=True)
    return grad.masked_fill(~counted[:, :, None], 0)
