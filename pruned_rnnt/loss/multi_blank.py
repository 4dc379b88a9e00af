"""The multi-blank transducer loss (arXiv 2211.03541): blanks that advance several frames.

Blanks of several durations are entries of the one softmax, and symbols have duration 0:

    alpha(t,u) = logsumexp of alpha(t,u-1) + lp(t,u-1,y[u])
                 and, for each blank b of duration d, alpha(t-d,u) + lp(t-d,u,b)

with lp = log_softmax(logits) - sigma. A path ends with a blank that lands on T exactly. It is the
recursion of TDT with another table of arcs (pruned_rnnt/ops/lattice/tdt_lattice.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pruned_rnnt.loss import checks
from pruned_rnnt.loss.logit_losses import check_logits, rows_of_logits
from pruned_rnnt.loss.results import reduced
from pruned_rnnt.loss.tdt_checks import check_longest
from pruned_rnnt.ops.common.utterances import Utterances
from pruned_rnnt.ops.joiner.row_loss import is_in_place
from pruned_rnnt.ops.joiner.tdt_row_loss import TdtLossOptions, TdtRows, tdt_row_loss
from pruned_rnnt.ops.lattice.tdt_lattice import MOST_DURATIONS, TdtOptions


def rnnt_loss_multi_blank(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    *,
    big_blanks: Mapping[int, int],
    sigma: float = 0.0,
    blank: int = 0,
    delay_penalty: float = 0.0,
    fastemit_lambda: float = 0.0,
    clamp: float | None = None,
    reduction: str = "mean",
    in_place: bool = False,
    validate: bool = False,
) -> Tensor:
    """Multi-blank transducer loss -log P(targets | logits), arXiv 2211.03541.

    Args:
        logits: (N, T, U+1, V), or packed, (sum T_n (U_n+1), V); as of rnnt_loss.
        targets, logit_lengths, target_lengths: as of rnnt_loss; targets are no big blanks.
        big_blanks: the frames by which each further blank advances, by its column: different
            integers from 2 on, at most 14.
        sigma: subtracted from each log-probability (logit under-normalization, 0.05 in the paper).
        blank: column of the blank that advances one frame; negative counts from the end.
        others: as of rnnt_loss.

    Returns:
        (N,) or a scalar; float64 for float64 logits, else float32.

    Raises:
        TypeError, ValueError: as rnnt_loss, where a target that is a big blank is one that does not
            fit; ValueError also for columns or durations of big_blanks that do not fit.
    """
    vocabulary = check_logits(logits, "U+1", in_place)
    checks.check_reduction(reduction)
    options = checks.check_options(
        blank, vocabulary, "regular", delay_penalty, fastemit_lambda, clamp
    )
    found = _check_big_blanks(big_blanks, options.blank, vocabulary)
    sigma = checks.check_finite("sigma", sigma)
    lattice = TdtOptions([0, 1, *found.values()], sigma, options.delay_penalty, True)
    tdt_options = TdtLossOptions(options, lattice, blanks=(options.blank, *found))
    batch = (targets, logit_lengths, target_lengths)
    utterances, geometry = rows_of_logits(logits, batch, None, options, validate)
    for column in found:
        utterances = _without(utterances, column, vocabulary, options.blank, validate)
    rows = TdtRows(utterances.targets, geometry)
    flat = logits.contiguous().view(-1, vocabulary)
    loss_N = tdt_row_loss(flat, None, rows, tdt_options, is_in_place(in_place))
    return reduced(loss_N, reduction)


def _check_big_blanks(big_blanks: Mapping[int, int], blank: int, vocabulary: int) -> dict[int, int]:
    if not isinstance(big_blanks, Mapping):
        raise TypeError(
            f"big_blanks is a {type(big_blanks).__name__}; it must be a mapping of columns to "
            "durations, for example {1: 2, 2: 4}"
        )
    found = {
        checks.check_integer("a column of big_blanks", column): checks.check_integer(
            f"big_blanks[{column}]", duration
        )
        for column, duration in big_blanks.items()
    }
    for column, duration in found.items():
        if not 0 <= column < vocabulary or column == blank:
            raise ValueError(
                f"big_blanks has the column {column}; it must be in 0..{vocabulary - 1} and not "
                f"that of blank, {blank}"
            )
        if duration < 2:
            raise ValueError(
                f"big_blanks[{column}] is {duration}; a big blank advances 2 frames or more"
            )
        check_longest(f"big_blanks[{column}]", duration)
    if len(set(found.values())) < len(found):
        raise ValueError(f"big_blanks is {big_blanks}; each blank needs a duration of its own")
    most = MOST_DURATIONS - 2
    if len(found) > most:
        raise ValueError(f"big_blanks has {len(found)} elements; it can have {most} at most")
    return found


def _without(
    utterances: Utterances, column: int, vocabulary: int, blank: int, validate: bool
) -> Utterances:
    """The utterances, whose targets must not be the big blank of this column. Where that is not
    checked, such a target becomes the blank, for which there is no path."""
    targets, lengths = utterances.targets, utterances.target_lengths
    if checks.readable(validate, targets, lengths):
        checks.check_symbols(targets, lengths, vocabulary, column)
        return utterances
    return utterances._replace(targets=targets.masked_fill(targets == column, blank))
