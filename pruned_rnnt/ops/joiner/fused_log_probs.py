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

from pruned_rnnt.ops.common.column_sums import column_sums
from pruned_rnnt.ops.common.library import define
from pruned_rnnt.ops.common.matrix_products import multiply_into
from pruned_rnnt.ops.joiner.joiner_rows import joiner_rows, joiner_rows_backward
from pruned_rnnt.ops.joiner.log_probs import log_probs, log_probs_backward


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
    hidden_rows: int,
    hidden: Tensor,
    logits: Tensor,
    grad_am: Tensor,
    grad_lm: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
) -> None:
    lengths, geometry = (logit_lengths, target_lengths), (start, row_splits, frames, columns)
    # Frames of padding and positions without frames are in no chunk.
    grad_am.zero_()
    grad_lm.zero_()
    largest = max(end - begin for begin, end in pairwise(cuts))
    grad_hidden = hidden.new_empty((min(largest, hidden_rows), hidden.shape[1]))
    # From the end, where the forward pass has left the last chunk.
    for begin, end in reversed(list(pairwise(cuts))):
        rows, hidden_chunk = logits[: end - begin], hidden[: end - begin]
        is_last = end == cuts[-1]
        if not (kept and is_last):
            _chunk_logits(
                am, lm, weight, bias, lengths, geometry, begin, activation, hidden_chunk, rows
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
        multiply_into(grad_weight, rows.t(), hidden_chunk, add=not is_last)
        column_sums(rows, grad_bias, add=not is_last)
        for first in range(0, end - begin, hidden_rows):
            piece = slice(first, min(first + hidden_rows, end - begin))
            grad_piece = grad_hidden[: piece.stop - first]
            multiply_into(grad_piece, rows[piece], weight)
            joiner_rows_backward(
                grad_piece,
                hidden_chunk[piece],
                *lengths,
                *geometry,
                begin + first,
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
    "int[] cuts, int vocabulary, int blank, int normalization, int activation, Tensor(a!) hidden, "
    "Tensor(b!) logits, Tensor(c!) px, Tensor(d!) py, Tensor(e!) lse) -> ()",
    _fused_log_probs,
)

# The same workspace; kept says that it still holds the last chunk, as the forward left it. The
# gradient of hidden is made for hidden_rows rows (whole frames) at a time. grad_am (N,T,D) of
# the dtype of am or acc; grad_lm (N,U+1,D), grad_weight (V',D), grad_bias (V') acc.
fused_log_probs_backward = define(
    "fused_log_probs_backward(Tensor grad_loss, Tensor am, Tensor lm, Tensor weight, Tensor bias, "
    "Tensor lse, Tensor gx, Tensor gy, Tensor targets, Tensor logit_lengths, "
    "Tensor target_lengths, Tensor? start, Tensor? row_splits, int T, int S, int[] cuts, "
    "int vocabulary, int blank, int normalization, int activation, float fastemit_lambda, "
    "float clamp, bool kept, int hidden_rows, Tensor(a!) hidden, Tensor(b!) logits, "
    "Tensor(c!) grad_am, Tensor(d!) grad_lm, Tensor(e!) grad_weight, Tensor(f!) grad_bias) -> ()",
    _fused_log_probs_backward,
)
