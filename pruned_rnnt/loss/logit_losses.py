"""The losses of the logits of lattice nodes, of RNN-T, TDT and multi-blank transducers: padded, or
packed without padding; over the whole lattice or a band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from pruned_rnnt.loss import checks
from pruned_rnnt.loss.batch import Sizes, check_batch, known_lengths
from pruned_rnnt.loss.bounds import check_bounds, check_bounds_type
from pruned_rnnt.loss.durations import (
    check_duration_logits,
    multi_blank_recursion,
    tdt_recursion,
)
from pruned_rnnt.loss.results import Bounds
from pruned_rnnt.ops.common.row_geometry import LatticeRows, packed_splits
from pruned_rnnt.ops.common.utterances import Utterances
from pruned_rnnt.ops.joiner.row_loss import is_in_place, row_loss
from pruned_rnnt.ops.lattice.recursion import Recursion


def rnnt_loss(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    *,
    bounds: Bounds | None = None,
    blank: int = 0,
    rnnt_type: str = "regular",
    from_log_probs: bool = False,
    delay_penalty: float = 0.0,
    fastemit_lambda: float = 0.0,
    clamp: float | None = None,
    hat: bool = False,
    reduction: str = "mean",
    in_place: bool = False,
    validate: bool = False,
) -> Tensor:
    """Transducer loss -log P(targets | logits), Graves arXiv 1211.3711.

    Logits other than float64 are normalised in float32: the relative error of a row's probabilities
    is up to 1.2e-7 times the size of its largest logit. If that is in the thousands (without hat),
    subtract each row's maximum, or pass logits.float().log_softmax(-1) with from_log_probs=True.

    Args:
        logits: (N, T, U+1, V), float64, float32, float16 or bfloat16; or packed,
            (sum T_n (U_n+1), V): the rows of each utterance's own lattice, frame by frame, one
            utterance after the other. With bounds (N, T, S, V), whose column j of frame t is
            u = bounds.start[n, t] + j; or packed, (sum T_n S, V). Log-probabilities, with
            from_log_probs.
        targets: (N, U) integers in 0..V-1, not the blank; padding may have any values.
        logit_lengths, target_lengths: (N,) integers, on the device of logits or the CPU. The
            default is T and U; packed logits need logit_lengths.
        bounds: of prune_bounds: the loss over the paths that stay inside the band, which must have
            one (arXiv 2206.13236).
        blank: column of the blank.
        rnnt_type: `regular`: any number of symbols a frame. `modified`: one at most, and a frame
            emits a symbol or a blank. `constrained`: as modified, a symbol followed by the blank of
            the same frame. `rna`: as modified, the last frame emits a blank.
        from_log_probs: do not normalise.
        delay_penalty: d adds d ((T_n - 1)/2 - t) to the log-probability of a symbol at frame t:
            above 0 favours early symbols.
        fastemit_lambda: f >= 0 scales the gradient through symbols by 1 + f; the loss stays
            (FastEmit, arXiv 2010.11148).
        clamp: bound of each element of d loss_n / d logits, applied before the incoming gradient.
        hat: blank is a Bernoulli variable, symbols share the rest (HAT, arXiv 2003.07705).
        reduction: `none`, `mean` (over utterances) or `sum`.
        in_place: write the gradient over the logits, which saves as much memory as they take;
            logits must not be used after the backward pass. No effect in torch.compile.
        validate: on other devices than the CPU, synchronize and check values as on the CPU;
            not in torch.compile, which refuses True.

    Returns:
        (N,) or a scalar; float64 for float64 logits, else float32.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: names the argument that does not fit. Values (lengths, targets, an utterance
            without a path) are checked on the CPU or with validate; otherwise the loss of such an
            utterance is +inf and its gradient 0.
    """
    vocabulary = check_logits(logits, bounds, in_place)
    if bounds is not None:
        check_bounds_type(bounds)
    checks.check_reduction(reduction)
    options = checks.check_options(
        blank, vocabulary, rnnt_type, delay_penalty, fastemit_lambda, clamp, hat, from_log_probs
    )
    batch = (targets, logit_lengths, target_lengths)
    return loss_of_logits(
        logits,
        batch,
        bounds,
        Recursion(options),
        in_place=in_place,
        validate=validate,
        reduction=reduction,
    )


def rnnt_loss_pruned(
    logits: Tensor,
    targets: Tensor,
    bounds: Bounds,
    logit_lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    *,
    blank: int = 0,
    rnnt_type: str = "regular",
    from_log_probs: bool = False,
    delay_penalty: float = 0.0,
    fastemit_lambda: float = 0.0,
    clamp: float | None = None,
    hat: bool = False,
    reduction: str = "mean",
    in_place: bool = False,
    validate: bool = False,
) -> Tensor:
    """rnnt_loss over the paths that stay inside a band; the arguments are those of rnnt_loss."""
    check_bounds_type(bounds)
    return rnnt_loss(
        logits,
        targets,
        logit_lengths,
        target_lengths,
        bounds=bounds,
        blank=blank,
        rnnt_type=rnnt_type,
        from_log_probs=from_log_probs,
        delay_penalty=delay_penalty,
        fastemit_lambda=fastemit_lambda,
        clamp=clamp,
        hat=hat,
        reduction=reduction,
        in_place=in_place,
        validate=validate,
    )


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
            (sum T_n (U_n+1), V); see rnnt_loss. With bounds (N, T, S, V) or (sum T_n S, V).
        duration_logits: the shape of logits with K = len(durations) instead of V, floating.
        targets, logit_lengths, target_lengths: see rnnt_loss.
        durations: frames by which an arc advances, one for each column of duration_logits:
            different integers in 0..1024, at least one above 0, at most 16.
        bounds: of prune_bounds: the loss over the paths whose arcs begin and end in the band.
        sigma: subtracted from each log-probability of symbols and blanks (logit
            under-normalization), which favours few arcs, and thus long durations.
        omega: probability with which the call is the RNN-T loss of logits instead, without sigma
            and with a gradient of 0 for duration_logits. Drawn on the host from torch's CPU
            generator; must be 0 in torch.export, torch.compile(fullgraph=True) and CUDA graphs.
        fastemit_lambda: scales the gradient through the symbols' log-probabilities, not that
            through their durations.
        clamp: bound of each element of d loss_n / d logits and d loss_n / d duration_logits.
        in_place: write the gradient of logits over them; see rnnt_loss.
        Remaining arguments: see rnnt_loss.

    Returns:
        (N,) or a scalar; float64 if logits or duration_logits are, to which the others are then
        promoted; else float32.

    Raises:
        TypeError, ValueError: as rnnt_loss; also durations that cannot add up to the frames of an
            utterance, which has no path then.
    """
    vocabulary = check_logits(logits, bounds, in_place)
    if bounds is not None:
        check_bounds_type(bounds)
    checks.check_reduction(reduction)
    options = checks.check_options(
        blank, vocabulary, "regular", delay_penalty, fastemit_lambda, clamp
    )
    recursion = tdt_recursion(options, durations, sigma, omega, logits.device)
    batch = (targets, logit_lengths, target_lengths)
    return loss_of_logits(
        logits,
        batch,
        bounds,
        recursion,
        duration_logits=duration_logits,
        in_place=in_place,
        validate=validate,
        reduction=reduction,
    )


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
        logits: (N, T, U+1, V), or packed, (sum T_n (U_n+1), V); see rnnt_loss.
        targets, logit_lengths, target_lengths: see rnnt_loss; targets are no big blanks.
        big_blanks: the frames by which each further blank advances, by its column: different
            integers from 2 on, at most 14.
        sigma: subtracted from each log-probability (logit under-normalization, 0.05 in the paper).
        blank: column of the blank that advances one frame.
        Remaining arguments: see rnnt_loss.

    Returns:
        (N,) or a scalar; float64 for float64 logits, else float32.

    Raises:
        TypeError, ValueError: as rnnt_loss, where a target that is a big blank is one that does not
            fit; ValueError also for columns or durations of big_blanks that do not fit.
    """
    vocabulary = check_logits(logits, None, in_place)
    checks.check_reduction(reduction)
    options = checks.check_options(
        blank, vocabulary, "regular", delay_penalty, fastemit_lambda, clamp
    )
    recursion = multi_blank_recursion(options, big_blanks, sigma, vocabulary)
    batch = (targets, logit_lengths, target_lengths)
    return loss_of_logits(
        logits,
        batch,
        None,
        recursion,
        in_place=in_place,
        validate=validate,
        reduction=reduction,
    )


def check_logits(logits: Tensor, bounds: Bounds | None, in_place: bool = False) -> int:
    """V of logits of four dimensions, or packed."""
    checks.check_tensor("logits", logits)
    columns = "U+1" if bounds is None else "S"
    shape = f"(N, T, {columns}, V) or packed (rows, V)"
    checks.check_floating("logits", logits, shape, 2 if logits.dim() == 2 else 4)
    checks.check_last_axis("logits", logits)
    wanted = is_in_place(checks.check_flag("in_place", in_place))
    if wanted and (not logits.is_contiguous() or logits.is_neg()):
        raise ValueError("in_place=True needs contiguous logits without a deferred change of sign")
    return logits.shape[-1]


def loss_of_logits(
    logits: Tensor,
    batch: tuple[Tensor, Tensor | None, Tensor | None],
    bounds: Bounds | None,
    recursion: Recursion,
    *,
    duration_logits: Tensor | None = None,
    in_place: bool = False,
    validate: bool = False,
    reduction: str = "none",
) -> Tensor:
    """(N,) or reduced, over the whole lattice or inside bounds, of logits that check_logits took;
    batch: targets and lengths, unchecked. duration_logits: of TDT, unchecked."""
    if recursion.tdt is not None and not recursion.blanks:
        dtype, durations = logits.dtype, recursion.tdt.durations
        logits, duration_logits = check_duration_logits(
            cast(Tensor, duration_logits), logits, durations
        )
        if in_place and logits.dtype != dtype:
            raise ValueError(
                f"in_place=True needs duration_logits of the precision of logits, {dtype}; they "
                f"are {duration_logits.dtype}"
            )
    utterances, rows = _rows_of_logits(logits, batch, bounds, recursion, validate)
    return row_loss(
        logits.contiguous(),
        duration_logits,
        utterances.targets,
        rows,
        recursion,
        reduction=reduction,
        in_place=is_in_place(in_place),
    )


def _rows_of_logits(
    logits: Tensor,
    batch: tuple[Tensor, Tensor | None, Tensor | None],
    bounds: Bounds | None,
    recursion: Recursion,
    validate: bool,
) -> tuple[Utterances, LatticeRows]:
    """The checked batch, on the device, and the geometry of padded or packed logits."""
    packed, vocabulary = logits.dim() == 2, logits.shape[-1]
    sizes = Sizes(None, None, None, vocabulary, logits.device, "logits")
    if not packed:
        count, frames, columns, _ = logits.shape
        symbols = columns - 1 if bounds is None else None
        sizes = sizes._replace(batch=count, frames=frames, symbols=symbols)
        if bounds is not None:
            shape = (count, frames, bounds.s_range, vocabulary)
            checks.check_shape("logits", logits, shape, "(N, T, S, V) with bounds.s_range for S")
    checked = check_batch(*batch, sizes, recursion, validate)
    if bounds is not None:
        bounds = check_bounds(bounds, checked, sizes.frames, recursion, validate)
    if packed:
        return _packed_rows(checked, bounds, logits.shape[0], validate)
    utterances = checked.on_device()
    start = None if bounds is None else bounds.start
    return utterances, LatticeRows(*utterances.lengths, start, None, *logits.shape[1:3])


def _packed_rows(
    utterances: Utterances, bounds: Bounds | None, rows: int, validate: bool
) -> tuple[Utterances, LatticeRows]:
    """The utterances, on the device, and the geometry of packed logits that the caller passes,
    whose rows must add up.

    If the lengths cannot be read, utterances beyond the last row get no frames, and so no path.
    """
    columns = None if bounds is None else bounds.s_range
    known = known_lengths(utterances, validate)
    if known is None:
        splits = packed_splits(*utterances.lengths, columns)
        reached_N = torch.where(splits[1:] <= rows, utterances.logit_lengths, 0)
        utterances, frames = utterances._replace(logit_lengths=reached_N), rows
    else:
        row_splits, _ = known.packed_rows(columns)
        if row_splits[-1] != rows:
            formula = "logit_lengths * " + ("(target_lengths + 1)" if bounds is None else "s_range")
            raise ValueError(
                f"logits has {rows} packed rows, but the sum of {formula} is {row_splits[-1]}"
            )
        frames = max(known.logit_lengths)
        utterances, splits = utterances._replace(host_lengths=known).on_device_with(row_splits)
    lengths = utterances.lengths
    if bounds is None:
        sizes = (frames, utterances.targets.shape[1] + 1)
        return utterances, LatticeRows(*lengths, None, splits, *sizes)
    sizes = (bounds.start.shape[1], bounds.s_range)
    return utterances, LatticeRows(*lengths, bounds.start, splits, *sizes)
