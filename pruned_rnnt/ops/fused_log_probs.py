"""Log-probabilities of a joiner's logits that are computed, chunk by chunk, in a workspace.

Axes: N batch, T frames, U symbols, S columns kept a frame, D joiner dim, V vocabulary, V' >= V
rows of the output layer, R lattice rows (row_geometry.py), C rows of the largest chunk.

These two ops are orchestration for every device: they call joiner_rows, a matrix product and
log_probs for one chunk after the other. They are ops so that torch.compile sees one node. How the
chunks are chosen and kept is in fused_joiner.py.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from pruned_rnnt.ops._library import define
from pruned_rnnt.ops.joiner_rows import joiner_rows, joiner_rows_backward
from pruned_rnnt.ops.log_probs import log_probs, log_probs_backward


def _chunk_logits(
    am: Tensor,
    lm: Tensor,
    weight: Tensor,
    bias: Tensor,
    lengths: tuple[Tensor, Tensor],
    geometry: tuple[Tensor | None, Tensor | None, int, int],
    begin: int,
    activation: int,
    hidden: Tensor,
    logits: Tensor,
) -> None:
    joiner_rows(am, lm, *lengths, *geometry, begin, activation, hidden)
    # With `out`, which autocast leaves alone: the dtype is chosen before.
    torch.addmm(bias, hidden, weight.t(), out=logits)


def _fused_log_probs(
    am: Tensor,
    lm: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    start: Tensor | None,
    row_splits: Tensor | None,
    frames: int,
    columns: int,
    cuts: list[int],
    vocabulary: int,
    blank: int,
    mode: int,
    activation: int,
    hidden: Tensor,
    logits: Tensor,
    px: Tensor,
    py: Tensor,
    lse: Tensor,
) -> None:
    lengths, geometry = (logit_lengths, target_lengths), (start, row_splits, frames, columns)
    for begin, end in pairwise(cuts):
        rows = logits[: end - begin]
        _chunk_logits(
            am, lm, weight, bias, lengths, geometry, begin, activation, hidden[: end - begin], rows
        )
        log_probs(
            rows[:, :vocabulary], targets, *lengths, *geometry, begin, blank, mode, px, py, lse
        )


def _fused_log_probs_backward(
    grad_loss: Tensor,
    am: Tensor,
    lm: Tensor,
    weight: Tensor,
    bias: Tensor,
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
    cuts: list[int],
    vocabulary: int,
    blank: int,
    mode: int,
    activation: int,
    fastemit_lambda: float,
    clamp: float,
    kept: bool,
    hidden: Tensor,
    logits: Tensor,
    grad_am: Tensor,
    grad_lm: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
) -> None:
    lengths, geometry = (logit_lengths, target_lengths), (start, row_splits, frames, columns)
    for sums in (grad_am, grad_lm, grad_weight, grad_bias):
        sums.zero_()
    grad_hidden = torch.empty_like(hidden)
    for begin, end in pairwise(cuts):
        count = end - begin
        rows, hidden_rows = logits[:count], hidden[:count]
        if not kept:
            _chunk_logits(
                am, lm, weight, bias, lengths, geometry, begin, activation, hidden_rows, rows
            )
        log_probs_backward(
            grad_loss,
            rows[:, :vocabulary],
            lse,
            gx,
            gy,
            targets,
            *lengths,
            *geometry,
            begin,
            blank,
            mode,
            fastemit_lambda,
            clamp,
            rows,
        )
        if grad_weight.dtype == rows.dtype:
            torch.addmm(grad_weight, rows.t(), hidden_rows, out=grad_weight)
        else:
            grad_weight += rows.t() @ hidden_rows
        grad_bias += rows.sum(0, dtype=grad_bias.dtype)
        torch.mm(rows, weight, out=grad_hidden[:count])
        joiner_rows_backward(
            grad_hidden[:count],
            hidden_rows,
            *lengths,
            *geometry,
            begin,
            activation,
            grad_am,
            grad_lm,
        )


# am (N,T,D), lm (N,U+1,D), weight (V',D), bias (V') of one dtype, V = vocabulary. Chunks are rows
# cuts[i] .. cuts[i+1]; hidden (C,D) and logits (C,V') are workspace for the largest chunk, and hold
# the last one afterwards. px, py, lse (R) acc as of log_probs.
fused_log_probs = define(
    "fused_log_probs(Tensor am, Tensor lm, Tensor weight, Tensor bias, Tensor targets, "
    "Tensor logit_lengths, Tensor target_lengths, Tensor? start, Tensor? row_splits, int T, int S, "
    "int[] cuts, int vocabulary, int blank, int normaliser, int activation, Tensor(a!) hidden, "
    "Tensor(b!) logits, Tensor(c!) px, Tensor(d!) py, Tensor(e!) lse) -> ()",
    _fused_log_probs,
)

# The same workspace; kept says that it still holds the one chunk there is, as the forward left it.
# grad_am (N,T,D), grad_lm (N,U+1,D), grad_weight (V',D), grad_bias (V') acc.
fused_log_probs_backward = define(
    "fused_log_probs_backward(Tensor grad_loss, Tensor am, Tensor lm, Tensor weight, Tensor bias, "
    "Tensor lse, Tensor gx, Tensor gy, Tensor targets, Tensor logit_lengths, "
    "Tensor target_lengths, Tensor? start, Tensor? row_splits, int T, int S, int[] cuts, "
    "int vocabulary, int blank, int normaliser, int activation, float fastemit_lambda, "
    "float clamp, bool kept, Tensor(a!) hidden, Tensor(b!) logits, Tensor(c!) grad_am, "
    "Tensor(d!) grad_lm, Tensor(e!) grad_weight, Tensor(f!) grad_bias) -> ()",
    _fused_log_probs_backward,
)
