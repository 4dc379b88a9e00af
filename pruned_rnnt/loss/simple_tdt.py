"""The TDT loss of the trivial joiner, and the band that its occupancy chooses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from pruned_rnnt.loss import checks
from pruned_rnnt.loss.bounds import check_band_width
from pruned_rnnt.loss.results import Bounds, TdtOccupancy, TdtSimpleLoss, reduced
from pruned_rnnt.loss.simple import check_scales
from pruned_rnnt.loss.tdt_checks import check_durations, check_tdt_options, check_tdt_paths
from pruned_rnnt.ops.common.library import REGULAR
from pruned_rnnt.ops.common.utterances import lengths_on
from pruned_rnnt.ops.pruning.tdt_bounds import tdt_bounds
from pruned_rnnt.ops.simple.simple_tdt import SimpleTdtInputs, simple_tdt_loss


def rnnt_loss_tdt_simple(
    am: Tensor,
    lm: Tensor,
    duration_am: Tensor,
    duration_lm: Tensor,
    targets: Tensor,
    logit_lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    *,
    durations: Sequence[int] = (0, 1, 2, 3, 4),
    sigma: float = 0.0,
    omega: float = 0.0,
    blank: int = 0,
    lm_only_scale: float = 0.0,
    am_only_scale: float = 0.0,
    delay_penalty: float = 0.0,
    fastemit_lambda: float = 0.0,
    reduction: str = "mean",
    validate: bool = False,
) -> TdtSimpleLoss:
    """TDT loss of the logits am(t) + lm(u), which are never stored, and the duration logits
    duration_am(t) + duration_lm(u).

    The two scales smooth the distribution of tokens, as in rnnt_loss_simple, not that of durations.

    Args:
        am: (N, T, V) and lm: (N, U+1, V), as of rnnt_loss_simple.
        duration_am: (N, T, K) and duration_lm: (N, U+1, K), floating, unnormalised.
            Tensors of several dtypes are promoted as by torch.
        durations, sigma, omega: as of rnnt_loss_tdt.
        others: as of rnnt_loss_simple.

    Returns:
        TdtSimpleLoss: loss and occupancy, in the dtype of rnnt_loss_simple's.

    Raises:
        TypeError, ValueError: as rnnt_loss_tdt.
    """
    sizes = checks.check_am_lm(am, lm, "V")
    (size, frames, vocabulary), columns = am.shape, lm.shape[1]
    found = check_durations(durations)
    for name, x, count in (
        ("duration_am", duration_am, frames),
        ("duration_lm", duration_lm, columns),
    ):
        checks.check_floating(name, x, "three-dimensional", 3)
        checks.check_same(name, x, "am", am)
        checks.check_shape(name, x, (size, count, len(found)), "that of its tokens with K for V")
    options = checks.check_options(blank, vocabulary, "regular", delay_penalty, fastemit_lambda)
    simple_options = check_scales(options, lm_only_scale, am_only_scale)
    tdt_options = check_tdt_options(options, found, sigma, omega, am.device)
    checks.check_reduction(reduction)
    checked = checks.check_batch(targets, logit_lengths, target_lengths, sizes, options, validate)
    check_tdt_paths(checks.known_lengths(checked, validate), found)
    given = (am, lm, duration_am, duration_lm)
    dtype = reduce(torch.promote_types, [x.dtype for x in given])
    am, lm, duration_am, duration_lm = (x.to(dtype).contiguous() for x in given)
    inputs = SimpleTdtInputs(am, lm, duration_am, duration_lm)
    batch = checked.on_device().tensors
    results = simple_tdt_loss(inputs, batch, simple_options, tdt_options)
    return TdtSimpleLoss(reduced(results.loss, reduction), TdtOccupancy(*results[1:]))


def prune_bounds_tdt(
    occupancy: TdtOccupancy,
    logit_lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    s_range: int = 5,
    *,
    durations: Sequence[int] = (0, 1, 2, 3, 4),
    exact: bool = False,
    validate: bool = False,
) -> Bounds:
    """The s_range columns of each frame with the most probability among the paths that visit it.

    Frames that durations skip take the columns of the last frame before them that paths visit. The
    band moves up by at most s_range - 1 columns a frame, or by one without a duration of 0, as in
    prune_bounds, so that a path of durations 0 (or 1) and 1 stays in it.

    Args:
        occupancy: of rnnt_loss_tdt_simple.
        durations: those of the loss.
        others: as of prune_bounds; s_range is at least 2.

    Returns:
        Bounds: start (N, T) int32 and s_range.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an argument that does not fit; on the CPU or with validate also an utterance
            without a band of that width.
    """
    if not isinstance(occupancy, TdtOccupancy):
        raise TypeError(
            f"occupancy is a {type(occupancy).__name__}; it must be the TdtOccupancy that "
            "rnnt_loss_tdt_simple returns"
        )
    emit, blank, stay = checks.check_occupancies(
        emit=occupancy.emit, blank=occupancy.blank, stay=occupancy.stay
    )
    found = check_durations(durations)
    arcs, shape = occupancy.durations, (*emit.shape, len(found))
    checks.check_floating("occupancy.durations", arcs, "(N, T, U+1, K)", 4)
    checks.check_same("occupancy.durations", arcs, "occupancy.emit", emit)
    meaning = "(N, T, U+1, K) with one column for each of durations"
    checks.check_shape("occupancy.durations", arcs, shape, meaning)
    s_range = checks.check_s_range(s_range, REGULAR)
    size, frames, columns = emit.shape
    sizes = checks.Sizes(size, frames, columns - 1, 0, emit.device, "occupancy")
    given = (logit_lengths, target_lengths)
    lengths, numbers = checks.check_lengths(*given, sizes, REGULAR, validate)
    check_tdt_paths(numbers, found)
    if 0 in found and numbers is not None:
        check_band_width(numbers, s_range, REGULAR)
    lengths = lengths_on(emit.device, lengths)
    start = tdt_bounds((emit, blank, stay), lengths, s_range=s_range, durations=found, exact=exact)
    return Bounds(start, s_range)
