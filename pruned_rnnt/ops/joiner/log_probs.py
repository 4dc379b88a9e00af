"""Log-probabilities of emit and blank at each lattice node, from logits or log-probs, and the
gradients of the loss by these and by duration logits.

With z the logits of a row, y the symbol its node emits, b blank, by normalization:
    0  log-softmax   lse = log sum_v exp z(v)          py = z(b) - lse, px = z(y) - lse
    1  log-probs     lse = 0                           py = z(b),       px = z(y)
    2  HAT           lse = log sum_{v != b} exp z(v)   py = logsigmoid(z(b)),
                                                       px = logsigmoid(-z(b)) + z(y) - lse
px = -inf from column U_n on and for a symbol outside 0..V-1 or equal to blank; on invalid nodes,
and on all nodes of an utterance with T_n > T or U_n > U, px = py = -inf and lse = 0. Where lse is
-inf, px (0 and 2) and py (0) are -inf.

The backward pass, with ex = (1 + fastemit_lambda) gx, per row:
    0  unit(v) = (ex + gy) exp(z(v) - lse) - ex [v = y] - gy [v = b]
    1  unit(v) = -ex [v = y] - gy [v = b]
    2  unit(v) = ex exp(z(v) - lse) - ex [v = y] for v != b;
       unit(b) = ex sigmoid(z(b)) - gy sigmoid(-z(b))
clamped to [-clamp, clamp] if clamp > 0, then times grad_loss[n].

The backward pass of duration logits w, from the occupancies of tdt_lattice.py, likewise clamped and
multiplied, with mass = sum_n gd(n), the probability that a path passes the node:
    unit(n) = mass softmax(w)(n) - gd(n)
FastEmit changes the gradient through the symbols' log-probabilities alone, and not this one.
Sources: HAT arXiv 2003.07705, FastEmit arXiv 2010.11148.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pruned_rnnt.ops.common.library import NEG_INF, Out, op
from pruned_rnnt.ops.common.row_geometry import LatticeRows
from pruned_rnnt.ops.lattice.recursion import GradientOptions

# The values of normalization.
LOGITS, LOG_PROBS, HAT = 0, 1, 2


class RowLogProbs(NamedTuple):
    """(R,) acc each."""

    px: Tensor
    py: Tensor
    lse: Tensor


class RowStatistics(NamedTuple):
    """The results of the forward pass that the gradient needs, (R,) acc each."""

    lse: Tensor
    gx: Tensor
    gy: Tensor


@op
def log_probs(
    logits: Tensor,
    targets: Tensor,
    rows: LatticeRows,
    row_begin: int,
    blank: int,
    normalization: int,
    out: Out[RowLogProbs],
) -> None:
    """logits (r,V) of any floating dtype, last stride 1, row stride >= V, are rows row_begin ..
    row_begin + r, which are written in px, py and lse. targets (N,U), lengths (N) int32."""
    count, vocabulary = logits.shape
    nodes = rows.nodes(row_begin, count)
    fits_N = (rows.logit_lengths <= rows.frames) & (rows.target_lengths <= targets.shape[1])
    nodes = nodes._replace(valid=nodes.valid & fits_N[nodes.n])
    y = rows.symbols_after(nodes, targets, vocabulary, blank)
    z = logits.to(out.px.dtype)
    emit, blank_score = z.gather(1, y.clamp_min(0)[:, None])[:, 0], z[:, blank]
    if normalization == LOG_PROBS:
        lse = torch.zeros_like(blank_score)
        dead = torch.zeros_like(nodes.valid)
    elif normalization == LOGITS:
        lse = _normaliser(z)
        dead = lse == NEG_INF
        emit, blank_score = emit - lse, blank_score - lse
    else:
        symbols = torch.arange(vocabulary, device=z.device) != blank
        lse = _normaliser(z.masked_fill(~symbols, NEG_INF))
        dead = lse == NEG_INF
        emit = logsigmoid(-blank_score) + emit - lse
        blank_score = logsigmoid(blank_score)
    no_blank = ~nodes.valid | (dead if normalization == LOGITS else False)
    written = slice(row_begin, row_begin + count)
    out.px[written] = emit.masked_fill(dead | (y < 0), NEG_INF)
    out.py[written] = blank_score.masked_fill(no_blank, NEG_INF)
    out.lse[written] = lse.masked_fill(~nodes.valid, 0)


def _normaliser(logits: Tensor) -> Tensor:
    """log-sum-exp of each row; NaN if one is +inf, after which no probability is right."""
    lse = torch.logsumexp(logits, dim=1)
    return lse.masked_fill(lse == torch.inf, torch.nan)


@op
def log_probs_backward(
    grad_loss: Tensor,
    logits: Tensor,
    statistics: RowStatistics,
    targets: Tensor,
    rows: LatticeRows,
    row_begin: int,
    options: GradientOptions,
    grad_logits: Out[Tensor],
) -> None:
    """grad_loss (N) acc is dL / d loss_n, loss_n = -log P_n. logits (r,V) and grad_logits (r,V')
    with V' >= V are rows row_begin ...; columns from V on are written 0. grad_logits may be the
    memory of logits. Rows with ex + gy = 0 and invalid rows get exact zeros, whatever the logits
    are. With LOG_PROBS, grad_logits must be zeros on a GPU, where two columns are written."""
    count, vocabulary = logits.shape
    nodes = rows.nodes(row_begin, count)
    y = rows.symbols_after(nodes, targets, vocabulary, options.blank)
    here = RowStatistics(*(x[row_begin : row_begin + count] for x in statistics))
    unit = unit_gradient(logits, here, y, options)
    unit *= grad_loss[nodes.n][:, None]
    grad_logits[:, :vocabulary] = unit.masked_fill_(~nodes.valid[:, None], 0)
    grad_logits[:, vocabulary:] = 0


def unit_gradient(
    logits: Tensor, statistics: RowStatistics, y: Tensor, options: GradientOptions
) -> Tensor:
    """unit (r,V) of rows with these statistics (r) and next symbols y (r), clamped; 0 in rows with
    ex + gy = 0."""
    blank, normalization, fastemit_lambda, clamp = options
    lse, gx, gy = (x[:, None] for x in statistics)
    ex, ey = (1 + fastemit_lambda) * gx, gy
    z = logits.to(gx.dtype)
    if normalization == LOG_PROBS:
        unit = torch.zeros_like(z)
    elif normalization == LOGITS:
        unit = (ex + ey) * (z - lse).exp()
    else:
        # Where nothing is emitted, the symbols may have no normaliser at all.
        unit = torch.where(ex == 0, 0, ex * (z - lse).exp())
        unit[:, blank] = 0
    unit.scatter_add_(1, y.clamp_min(0)[:, None], -torch.where(y[:, None] >= 0, ex, 0))
    if normalization == HAT:
        blank_score = z[:, blank, None]
        unit[:, blank, None] = ex * torch.sigmoid(blank_score) - ey * torch.sigmoid(-blank_score)
    else:
        unit[:, blank, None] -= ey
    if clamp > 0:
        unit.clamp_(-clamp, clamp)
    return unit.masked_fill_(ex + ey == 0, 0)


@op
def duration_gradient(
    grad_loss: Tensor,
    duration_logits: Tensor,
    gd: Tensor,
    rows: LatticeRows,
    row_begin: int,
    clamp: float,
    grad: Out[Tensor],
) -> None:
    """grad_loss (N), duration_logits and gd (R,K), all acc -> grad (r,K) of any floating dtype and
    row stride, of rows row_begin .. row_begin + r. Rows without mass get exact zeros."""
    written = slice(row_begin, row_begin + grad.shape[0])
    occupancy = gd[written]
    mass = occupancy.sum(1, keepdim=True)
    unit = mass * duration_logits[written].softmax(1) - occupancy
    if clamp > 0:
        unit.clamp_(-clamp, clamp)
    n = rows.nodes(row_begin, grad.shape[0]).n
    grad.copy_(torch.where(mass == 0, 0, unit * grad_loss[n][:, None]))
