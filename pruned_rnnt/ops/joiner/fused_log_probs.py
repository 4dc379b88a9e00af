"""Log-probabilities of a joiner's logits that are computed, chunk by chunk, in a workspace.

Axes: N batch, T frames, U symbols, S columns kept a frame, D joiner dim, V vocabulary, V' >= V
rows of the output layer, R lattice rows (row_geometry.py), C rows of the largest chunk.

These two ops call joiner_rows, a matrix product and log_probs for one chunk after the other, on
every device. They are ops so that torch.compile sees one node. How the chunks are chosen and kept
is in fused_joiner.py.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.column_sums import column_sums
from pruned_rnnt.ops.common.library import define
from pruned_rnnt.ops.common.matrix_products import multiply_into
from pruned_rnnt.ops.joiner.joiner_rows import joiner_rows, joiner_rows_backward
from pruned_rnnt.ops.joiner.log_probs import log_probs, log_probs_backward


class JoinerInputs(NamedTuple):
    """am (N,T,D), lm (N,U+1,D), weight (V',D), bias (V') of one dtype; targets and lengths; start
    and row_splits of the rows' geometry."""

    am: Tensor
    lm: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor
    logit_lengths: Tensor
    target_lengths: Tensor
    start: Tensor | None
    row_splits: Tensor | None

    def rows(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Lengths and geometry, as `LatticeRows` begins."""
        return self.logit_lengths, self.target_lengths, self.start, self.row_splits


class _Chunks(NamedTuple):
    """The arguments that both ops take, by the names of their schemas."""

    inputs: JoinerInputs
    frames: int
    columns: int
    chunk_offsets: list[int]
    vocabulary: int
    activation: int
    blank: int
    normalization: int
    hidden: Tensor
    logits: Tensor

    def rows(self) -> tuple[Any, ...]:
        """Which node each row is, as the ops of rows take it."""
        return (*self.inputs.rows(), self.frames, self.columns)

    def compute_logits(self, begin: int, count: int) -> None:
        am, lm, weight, bias, *_ = self.inputs
        hidden = self.hidden[:count]
        joiner_rows(am, lm, *self.rows(), begin, self.activation, hidden)
        # With `out`, which autocast leaves alone: the dtype is chosen before.
        torch.addmm(bias, hidden, weight.t(), out=self.logits[:count])


def _fused_log_probs(*inputs: Any, px: Tensor, py: Tensor, lse: Tensor, **shared: Any) -> None:
    chunks = _Chunks(JoinerInputs(*inputs), **shared)
    for begin, end in pairwise(chunks.chunk_offsets):
        chunks.compute_logits(begin, end - begin)
        logits = chunks.logits[: end - begin, : chunks.vocabulary]
        row_options = (*chunks.rows(), begin, chunks.blank, chunks.normalization)
        log_probs(logits, chunks.inputs.targets, *row_options, px, py, lse)


def _fused_log_probs_backward(
    *inputs: Any,
    grad_loss: Tensor,
    lse: Tensor,
    gx: Tensor,
    gy: Tensor,
    fastemit_lambda: float,
    clamp: float,
    hidden_rows: int,
    has_last_chunk: bool,
    grad_am: Tensor,
    grad_lm: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    **shared: Any,
) -> None:
    chunks = _Chunks(JoinerInputs(*inputs), **shared)
    targets, weight, rows = chunks.inputs.targets, chunks.inputs.weight, chunks.rows()
    # Frames of padding and positions without frames are in no chunk.
    grad_am.zero_()
    grad_lm.zero_()
    largest, width = chunks.hidden.shape
    grad_hidden = chunks.hidden.new_empty((min(largest, hidden_rows), width))
    # From the end, where the forward pass has left the last chunk.
    for begin, end in reversed(list(pairwise(chunks.chunk_offsets))):
        hidden, padded = chunks.hidden[: end - begin], chunks.logits[: end - begin]
        is_last = end == chunks.chunk_offsets[-1]
        if not (has_last_chunk and is_last):
            chunks.compute_logits(begin, end - begin)
        logits, options = padded[:, : chunks.vocabulary], (chunks.blank, chunks.normalization)
        statistics, penalties = (lse, gx, gy), (fastemit_lambda, clamp)
        log_probs_backward(
            grad_loss, logits, *statistics, targets, *rows, begin, *options, *penalties, padded
        )
        multiply_into(grad_weight, padded.t(), hidden, add=not is_last)
        column_sums(padded, grad_bias, add=not is_last)
        for first in range(0, end - begin, hidden_rows):
            piece = slice(first, min(first + hidden_rows, end - begin))
            grad_piece = grad_hidden[: piece.stop - first]
            multiply_into(grad_piece, padded[piece], weight)
            at, activation = begin + first, chunks.activation
            joiner_rows_backward(grad_piece, hidden[piece], *rows, at, activation, grad_am, grad_lm)


# am (N,T,D), lm (N,U+1,D), weight (V',D), bias (V') of one dtype, V = vocabulary. Chunks are rows
# chunk_offsets[i] .. chunk_offsets[i+1]; hidden (C,D) and logits (C,V') are workspace for the
# largest chunk, and hold the last one afterwards.
_SHARED = (
    "Tensor am, Tensor lm, Tensor weight, Tensor bias, Tensor targets, Tensor logit_lengths, "
    "Tensor target_lengths, Tensor? start, Tensor? row_splits, *, int frames, int columns, "
    "int[] chunk_offsets, int vocabulary, int activation, int blank, int normalization, "
    "Tensor(a!) hidden, Tensor(b!) logits"
)

# px, py, lse (R) acc as of log_probs.
fused_log_probs = define(
    f"fused_log_probs({_SHARED}, Tensor(c!) px, Tensor(d!) py, Tensor(e!) lse) -> ()",
    _fused_log_probs,
)

# has_last_chunk: the workspace still holds the last chunk, as the forward left it. The gradient of
# hidden is computed for hidden_rows rows (whole frames) at a time. grad_am (N,T,D) of the dtype of
# am or acc; grad_lm (N,U+1,D), grad_weight (V',D), grad_bias (V') acc.
fused_log_probs_backward = define(
    f"fused_log_probs_backward({_SHARED}, Tensor grad_loss, Tensor lse, Tensor gx, Tensor gy, "
    "float fastemit_lambda, float clamp, int hidden_rows, bool has_last_chunk, "
    "Tensor(c!) grad_am, Tensor(d!) grad_lm, Tensor(e!) grad_weight, Tensor(f!) grad_bias) -> ()",
    _fused_log_probs_backward,
)
