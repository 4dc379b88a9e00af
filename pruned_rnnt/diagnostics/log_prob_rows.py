"""Log-probabilities of the arcs of a lattice from a joiner's logits, and their occupancies.

Axes: N batch, T frames, U symbols, S columns per frame (U + 1, or s_range of a band), V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pruned_rnnt.loss import checks
from pruned_rnnt.loss.mutual_information import mutual_information
from pruned_rnnt.loss.results import Occupancy
from pruned_rnnt.ops.common.library import accumulator
from pruned_rnnt.ops.common.utterances import as_int32
from pruned_rnnt.ops.joiner.log_probs import log_probs

if TYPE_CHECKING:
    from pruned_rnnt.loss.results import Bounds


class LogProbRows(NamedTuple):
    """emit, blank: (N, T, S) log-probabilities without gradient, -inf for missing arcs."""

    emit: Tensor
    blank: Tensor


@torch.no_grad()
def log_prob_rows(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    *,
    bounds: Bounds | None = None,
    blank: int = 0,
    from_log_probs: bool = False,
    hat: bool = False,
) -> LogProbRows:
    """Log-probabilities of the next symbol and of blank in every node.

    Args:
        logits: (N, T, S, V), of any floating dtype.
        targets: (N, U) integers; logit_lengths, target_lengths: (N,).
        bounds: the band whose columns are given; None for a full lattice, S = U + 1.
        blank, from_log_probs, hat: as in `pruned_rnnt.rnnt_loss`.

    Returns:
        LogProbRows, in float64 for float64 logits, else in float32.

    Raises:
        TypeError, ValueError: name the argument that does not fit, for instance logits that are not
            (N, T, S, V) for these targets or this band.
    """
    checks.check_integers("targets", targets)
    columns = targets.shape[1] + 1 if bounds is None else bounds.s_range
    if logits.ndim != 4 or logits.shape[2] != columns:
        raise ValueError(
            f"logits has shape {tuple(logits.shape)}; it must be (N, T, S, V) with S = {columns}"
        )
    checks.check_floating("logits", logits, "(N, T, S, V)", 4)
    batch, frame_count, _, size = logits.shape
    options = checks.check_options(blank, size, hat=hat, from_log_probs=from_log_probs)
    checks.check_shape("targets", targets, (batch, *targets.shape[1:2]), "(N, U)")
    lengths = {"logit_lengths": logit_lengths, "target_lengths": target_lengths}
    for name, x in lengths.items():
        checks.check_integers(name, x)
        checks.check_shape(name, x, (batch,), "(N,)")
    shape = (batch, frame_count, columns)
    emit, blanks, scratch = (
        torch.empty(shape, dtype=accumulator(logits.dtype), device=logits.device) for _ in range(3)
    )
    start = None
    if bounds is not None:
        checks.check_integers("bounds.start", bounds.start)
        checks.check_shape("bounds.start", bounds.start, (batch, frame_count), "(N, T)")
        start = as_int32(bounds.start).to(logits.device)
    log_probs(
        logits.reshape(-1, size).contiguous(),
        *(as_int32(x).to(logits.device) for x in (targets, *lengths.values())),
        start,
        None,
        frame_count,
        columns,
        0,
        options.blank,
        options.normalization,
        emit.view(-1),
        blanks.view(-1),
        scratch.view(-1),
    )
    return LogProbRows(emit, blanks)


@torch.no_grad()
def occupancy_of_rows(
    rows: LogProbRows,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    *,
    rnnt_type: str = "regular",
) -> Occupancy:
    """The posterior probability of each arc of a full lattice.

    Args:
        rows: (N, T, U + 1), from `log_prob_rows` without a band.
        logit_lengths, target_lengths: (N,), 1 <= T_n <= T.
        rnnt_type: as in `pruned_rnnt.rnnt_loss`.
    """
    px = rows.emit[:, :, :-1].transpose(1, 2)
    if rnnt_type == "regular":
        px = pad(px, (0, 1), value=-torch.inf)
    frames, symbols = (x.to(px.device, torch.int32) for x in (logit_lengths, target_lengths))
    begin = torch.zeros_like(frames)
    boundary = torch.stack((begin, begin, symbols, frames), dim=1)
    found = mutual_information(px, rows.blank.transpose(1, 2), boundary, rnnt_type=rnnt_type)
    emit_NTU = found.occupancy.emit[:, :, : rows.emit.size(1)].transpose(1, 2)
    return Occupancy(pad(emit_NTU, (0, 1)), found.occupancy.blank.transpose(1, 2))
