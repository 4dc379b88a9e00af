"""The log-probabilities of a packed whole lattice whose number of rows only the device knows.

Room is planned for the rows of all padding; chunks behind the last row are empty, and their
products leave out what they have no rows for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.ops.common.library import Out, op
from pruned_rnnt.ops.common.row_geometry import packed_splits
from pruned_rnnt.ops.joiner.active_gradients import chunk_logits, weight_and_bias
from pruned_rnnt.ops.joiner.active_rows import ActiveRows
from pruned_rnnt.ops.joiner.fused_log_probs import JoinerInputs, JoinerPlan
from pruned_rnnt.ops.joiner.log_probs import RowLogProbs, log_probs


@op
def fitting_splits(
    logit_lengths: Tensor,
    target_lengths: Tensor,
    frames: int,
    columns: int,
    row_splits: Out[Tensor],
) -> None:
    """row_splits (N+1) int64 of a packed whole lattice, from lengths (N) int32; without rows for
    utterances that exceed the padding, T frames and S columns (their loss is inf)."""
    fits = (logit_lengths <= frames) & (logit_lengths >= 0)
    fits &= (target_lengths < columns) & (target_lengths >= 0)
    row_splits.copy_(packed_splits(logit_lengths * fits, target_lengths * fits, None))


@op
def packed_log_probs(
    inputs: JoinerInputs, plan: JoinerPlan, hidden: Out[Tensor], out: Out[RowLogProbs]
) -> None:
    """px, py and lse (R) acc, see log_probs, for the rows that row_splits has; those behind them,
    for which there is room, are arbitrary. Workspace: hidden (C,D+8), of the chunks' C rows."""
    assert inputs.row_splits is not None
    rows, chunk_rows = plan.lattice_rows(inputs), len(hidden)
    layer = weight_and_bias(inputs.weight, inputs.bias)
    (blank, normalization, *_), total = plan.options, int(inputs.row_splits[-1])
    numbers = torch.arange(total, dtype=torch.int32, device=hidden.device)
    for begin in range(0, total, chunk_rows):
        begins = torch.tensor([begin, min(begin + chunk_rows, total)], device=hidden.device)
        every = ActiveRows(numbers, numbers, begins, begins, begins)
        at = (rows, every, 0, begins.diff())
        padded = chunk_logits(inputs.am, inputs.lm, layer, *at, plan.activation, hidden)
        logits = padded[: plan.rows - begin, : plan.vocabulary]
        log_probs(logits, inputs.targets, rows, begin, blank, normalization, out)
