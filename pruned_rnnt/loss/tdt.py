"""The loss of token-and-duration transducers (TDT), over the whole lattice or inside a band."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pruned_rnnt.loss import checks
from pruned_rnnt.loss.bounds import check_bounds_type
from pruned_rnnt.loss.logit_losses import check_logits, rows_of_logits
from pruned_rnnt.loss.results import Bounds, reduced
from pruned_rnnt.loss.tdt_checks import (
    check_duration_logits,
    check_durations,
    check_tdt_options,
    check_tdt_paths,
)
from pruned_rnnt.ops.joiner.row_loss import is_in_place
from pruned_rnnt.ops.joiner.tdt_row_loss import TdtRows, tdt_row_loss


def rnnt_loss_tdt(
    logits: Tensor,
    duration_logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    *,
    durations: Sequence[int] = (0, 1, 2, 3, 4),
    bounds: Bounds | None = None,
    sigma: float = 0.0,
    omega: float = 0.0,
    blank: int = 0,
    delay_penalty: float = 0.0,
    fastemit_lambda: float = 0.0,
    clamp: float | None = None,
    reduction: str = "mean",
    in_place: bool = False,
    validate: bool = False,
) -> Tensor:
    """Token-and-duration transducer loss -log P(targets | logits), arXiv 2304.06795.

    Every arc has a duration, by which it advances the frame, with a distribution of its own:
    log_softmax(logits) - sigma + log_softmax(duration_logits) is the score of a symbol or blank and
    its duration. A blank advances by one frame or more; a symbol may stay (duration 0) and lands
    before the last frame's end; the last arc is a blank that lands on frame T_n exactly.

    Args:
        logits: (N, T, U+1, V), float64, float32, float16 or bfloat16; or packed,
            (sum T_n (U_n+1), V), as of rnnt_loss. With bounds (N, T, S, V) or (sum T_n S, V).
        duration_logits: the shape of logits with K = len(durations) instead of V, floating.
        targets, logit_lengths, target_lengths: as of rnnt_loss.
        durations: frames by which an arc advances, one for each column of duration_logits:
            different integers in 0..1024, at least one above 0, at most 16.
        bounds: of prune_bounds_tdt: the loss over the paths whose arcs begin and end in the band.
        sigma: subtracted from each log-probability of symbols and blanks (logit
            under-normalization), which favours few arcs, and thus long durations.
        omega: probability with which the call is the RNN-T loss of logits instead, without sigma
            and with a gradient of 0 for duration_logits. Drawn on the host from torch's CPU
            generator; must be 0 in torch.compile and CUDA graphs.
        fastemit_lambda: scales the gradient through the symbols' log-probabilities, not that
            through their durations.
        clamp: bound of each element of d loss_n / d logits and d loss_n / d duration_logits.
        in_place: write the gradient of logits over them, as of rnnt_loss.
        others: as of rnnt_loss.

    Returns:
        (N,) or a scalar; float64 if logits or duration_logits are, to which the others are then
        promoted; else float32.

    Raises:
        TypeError, ValueError: as rnnt_loss; also durations that cannot add up to the frames of an
            utterance, which has no path then.
    """
    V = check_logits(logits, "U+1" if bounds is None else "S", in_place)
    if bounds is not None:
        check_bounds_type(bounds)
    checks.check_reduction(reduction)
    found = check_durations(durations)
    dtype = logits.dtype
    logits, flat_durations = check_duration_logits(duration_logits, logits, found)
    if in_place and logits.dtype != dtype:
        raise ValueError(
            f"in_place=True needs duration_logits of the precision of logits, {dtype}; they are "
            f"{duration_logits.dtype}"
        )
    options = checks.check_options(blank, V, "regular", delay_penalty, fastemit_lambda, clamp)
    tdt_options = check_tdt_options(options, found, sigma, omega, logits.device)
    batch = (targets, logit_lengths, target_lengths)
    utterances, rows = rows_of_logits(logits, batch, bounds, options, validate)
    check_tdt_paths(checks.known_lengths(utterances, validate), found)
    flat = logits.contiguous().view(-1, V)
    tdt_rows = TdtRows(utterances.targets, rows)
    loss = tdt_row_loss(flat, flat_durations, tdt_rows, tdt_options, is_in_place(in_place))
    return reduced(loss, reduction)
