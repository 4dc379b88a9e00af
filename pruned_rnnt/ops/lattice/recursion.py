"""The recursion of a loss over the arcs of its model: RNN-T, TDT or multi-blank."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import new_outputs
from pruned_rnnt.ops.common.row_geometry import LatticeRows
from pruned_rnnt.ops.lattice.lattice import LatticeSums, band_lattice, split_workspace
from pruned_rnnt.ops.lattice.tdt_lattice import TdtOptions, TdtSums, tdt_lattice, tdt_workspace


class GradientOptions(NamedTuple):
    """The options of the gradient of the logits, as in LossOptions."""

    blank: int
    normalization: int
    fastemit_lambda: float
    clamp: float


class LossOptions(NamedTuple):
    """The scalars that the recursion and its gradient depend on.

    blank: 0..V-1. normalization: log_probs.LOGITS, LOG_PROBS or HAT. rnnt_type: as in
    library.RNNT_TYPES. clamp: 0.0 for none.
    """

    blank: int
    normalization: int
    rnnt_type: int
    delay_penalty: float
    fastemit_lambda: float
    clamp: float

    @property
    def of_gradient(self) -> GradientOptions:
        """The options of log_probs_backward."""
        return GradientOptions(self.blank, self.normalization, self.fastemit_lambda, self.clamp)


class Recursion(NamedTuple):
    """The model whose paths a loss sums over.

    tdt: the durations of the arcs of TDT, whose nodes have duration logits, and of multi-blank;
        None for RNN-T, whose arcs are those of loss.rnnt_type.
    ignores_durations: a TDT model, but the loss is the RNN-T loss of the token logits, and the
        gradient of the duration logits is 0 (omega).
    blanks: the columns of the blanks of multi-blank, in the order of tdt.durations from the second
        on; it has no duration logits.
    """

    loss: LossOptions
    tdt: TdtOptions | None = None
    ignores_durations: bool = False
    blanks: tuple[int, ...] = ()


def run_recursion(
    px: Tensor,
    py: Tensor,
    rows: LatticeRows,
    recursion: Recursion,
    duration_logits: Tensor | None = None,
    *,
    symbols: int = 0,
    occupancies: tuple[Tensor, Tensor] | None = None,
) -> LatticeSums | TdtSums:
    """total (N,) = log P and occupancies for acc px and py of any shape with R elements.

    duration_logits: acc, of that shape and K, see tdt_lattice; symbols: the padded U. Both of
        models with durations alone, whose occupancies are TdtSums.
    occupancies: memory for gx and gy, of the shape of px; None for new ones.
    """
    tdt, total = recursion.tdt, px.new_empty(rows.logit_lengths.shape)
    gx, gy = occupancies or new_outputs(2, px, px.shape, px.dtype)
    if tdt is None or recursion.ignores_durations:
        utterances = total.shape[0]
        frames = utterances * rows.frames
        if rows.row_splits is not None:
            # Packed utterances, whose longest may be unknown, have a row or more for each frame.
            frames = torch.sym_min(frames, px.numel())
        work = split_workspace(px, utterances, rows.columns, frames)
        flat = (px, py, gx, gy)
        if px.dim() > 1:
            flat = (px.view(-1), py.view(-1), gx.view(-1), gy.view(-1))
        topology = (recursion.loss.rnnt_type, recursion.loss.delay_penalty)
        band_lattice(*flat[:2], rows, *topology, work, LatticeSums(total, *flat[2:]))
        if duration_logits is None:
            return LatticeSums(total, gx, gy)
        return TdtSums(total, gx, gy, gx, torch.zeros_like(duration_logits))
    assert duration_logits is not None
    stay = torch.empty_like(px)
    # Packed rows that no utterance reaches, where lengths were not read, are not written.
    like = torch.empty_like if rows.row_splits is None else torch.zeros_like
    gd, by_row = like(duration_logits), (-1, len(tdt.durations))
    sums = TdtSums(total, gx.view(-1), gy.view(-1), stay.view(-1), gd.view(by_row))
    scores = (px.view(-1), py.view(-1), duration_logits.view(by_row))
    work = tdt_workspace(scores[0], total.shape[0], symbols, tdt.durations)
    tdt_lattice(*scores, rows, tdt, symbols, work, sums)
    return TdtSums(total, gx, gy, stay, gd)
