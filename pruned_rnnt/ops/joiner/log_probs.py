"""Log-probabilities of emit and blank at each lattice node, from logits or log-probs.

Axes: N batch, T frames, U symbols, S columns kept a frame, V vocabulary, R rows of the whole
geometry (row_geometry.py), r rows of the chunk at hand. acc: float64 for float64 logits, else
float32.

With z the logits of a row, y the symbol its node emits, b blank:
    mode 0  log-softmax   lse = log sum_v exp z(v)          py = z(b) - lse, px = z(y) - lse
    mode 1  log-probs     lse = 0                           py = z(b),       px = z(y)
    mode 2  HAT           lse = log sum_{v != b} exp z(v)   py = logsigmoid(z(b)),
                                                            px = logsigmoid(-z(b)) + z(y) - lse
px = -inf from column U_n on and for a symbol outside 0..V-1 or equal to blank; on invalid nodes,
and on all nodes of an utterance with T_n > T or U_n > U, px = py = -inf and lse = 0. Where lse is
-inf, px (modes 0 and 2) and py (mode 0) are -inf.

The backward pass, with ex = (1 + fastemit_lambda) gx, per row:
    mode 0  unit(v) = (ex + gy) exp(z(v) - lse) - ex [v = y] - gy [v = b]
    mode 1  unit(v) = -ex [v = y] - gy [v = b]
    mode 2  unit(v) = ex exp(z(v) - lse) - ex [v = y] for v != b;
            unit(b) = ex sigmoid(z(b)) - gy sigmoid(-z(b))
clamped to [-clamp, clamp] if clamp > 0, then times grad_loss[n].
Sources: HAT arXiv 2003.07705, FastEmit arXiv 2010.11148.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pruned_rnnt.ops.common.library import define
from pruned_rnnt.ops.common.row_geometry import nodes_of_rows, symbols_after, within_padding

NEG_INF = float("-inf")
LOGITS, LOG_PROBS, HAT = 0, 1, 2


def _log_probs(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    start: Tensor | None,
    row_splits: Tensor | None,
    frames: int,
    columns: int,
    row_begin: int,
    blank: int,
    mode: int,
    px: Tensor,
    py: Tensor,
    lse: Tensor,
) -> None:
    count, size = logits.shape
    nodes = nodes_of_rows(
        logit_lengths, target_lengths, start, row_splits, frames, columns, row_begin, count
    )
    nodes = within_padding(nodes, logit_lengths, target_lengths, frames, targets.shape[1])
    y = symbols_after(nodes, targets, target_lengths, size, blank)
    z = logits.to(px.dtype)
    emit = z.gather(1, y.clamp_min(0)[:, None])[:, 0]
    stay = z[:, blank]
    if mode == LOG_PROBS:
        normaliser = torch.zeros_like(stay)
        dead = torch.zeros_like(nodes.valid)
    elif mode == LOGITS:
        normaliser = torch.logsumexp(z, dim=1)
        dead = normaliser == NEG_INF
        emit, stay = emit - normaliser, stay - normaliser
    else:
        symbols = torch.arange(size, device=z.device) != blank
        normaliser = torch.logsumexp(z.masked_fill(~symbols, NEG_INF), dim=1)
        dead = normaliser == NEG_INF
        emit = logsigmoid(-stay) + emit - normaliser
        stay = logsigmoid(stay)
    rows = slice(row_begin, row_begin + count)
    px[rows] = emit.masked_fill(dead | (y < 0), NEG_INF)
    py[rows] = stay.masked_fill(~nodes.valid | (dead if mode == LOGITS else False), NEG_INF)
    lse[rows] = normaliser.masked_fill(~nodes.valid, 0)


def _log_probs_backward(
    grad_loss: Tensor,
    logits: Tensor,
    lse: Tensor,
    gx: Tensor,
    gy: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    start: Tensor | None,
    row_splits: Tensor | None,
    frames: int,
    columns: int,
    row_begin: int,
    blank: int,
    mode: int,
    fastemit_lambda: float,
    clamp: float,
    grad_logits: Tensor,
) -> None:
    count, size = logits.shape
    nodes = nodes_of_rows(
        logit_lengths, target_lengths, start, row_splits, frames, columns, row_begin, count
    )
    y = symbols_after(nodes, targets, target_lengths, size, blank)
    rows = slice(row_begin, row_begin + count)
    ex = ((1 + fastemit_lambda) * gx[rows])[:, None]
    ey = gy[rows][:, None]
    z = logits.to(gx.dtype)
    emitted = torch.where(y[:, None] >= 0, ex, 0)
    if mode == LOG_PROBS:
        unit = torch.zeros_like(z)
    elif mode == LOGITS:
        unit = (ex + ey) * (z - lse[rows][:, None]).exp()
    else:
        # Where nothing is emitted, the symbols may have no normaliser at all.
        unit = torch.where(ex == 0, 0, ex * (z - lse[rows][:, None]).exp())
        unit[:, blank] = 0
    unit.scatter_add_(1, y.clamp_min(0)[:, None], -emitted)
    if mode == HAT:
        stay = z[:, blank, None]
        unit[:, blank, None] = ex * torch.sigmoid(stay) - ey * torch.sigmoid(-stay)
    else:
        unit[:, blank, None] -= ey
    if clamp > 0:
        unit.clamp_(-clamp, clamp)
    unit *= grad_loss[nodes.n][:, None]
    unused = ~nodes.valid[:, None] | (ex + ey == 0)
    grad_logits[:, :size] = unit.masked_fill_(unused, 0)
    grad_logits[:, size:] = 0


# The schemas call the mode `normaliser`: torch.compile cannot trace an argument named mode.
# logits (r,V) of any floating dtype, last stride 1, row stride >= V, hold rows row_begin ..
# row_begin + r; px, py, lse (R) acc get these rows written. targets (N,U), lengths (N) int32.
log_probs = define(
    "log_probs(Tensor logits, Tensor targets, Tensor logit_lengths, Tensor target_lengths, "
    "Tensor? start, Tensor? row_splits, int T, int S, int row_begin, int blank, int normaliser, "
    "Tensor(a!) px, Tensor(b!) py, Tensor(c!) lse) -> ()",
    _log_probs,
)

# grad_loss (N) acc is dL / d loss_n, loss_n = -log P_n. lse, gx, gy (R) acc; logits (r,V) and
# grad_logits (r,V') with V' >= V hold rows row_begin ...; columns from V on are written 0.
# grad_logits may be the memory of logits. Rows with ex + gy = 0 and invalid rows get exact zeros,
# whatever the logits hold.
log_probs_backward = define(
    "log_probs_backward(Tensor grad_loss, Tensor logits, Tensor lse, Tensor gx, Tensor gy, "
    "Tensor targets, Tensor logit_lengths, Tensor target_lengths, Tensor? start, "
    "Tensor? row_splits, int T, int S, int row_begin, int blank, int normaliser, "
    "float fastemit_lambda, float clamp, Tensor(a!) grad_logits) -> ()",
    _log_probs_backward,
)
