"""The transducer loss of logits, over the whole lattice or inside a band."""

from __future__ import annotations

from torch import Tensor

from pruned_rnnt.loss import checks
from pruned_rnnt.loss.bounds import check_bounds, check_bounds_type
from pruned_rnnt.loss.packing import given_packed_rows
from pruned_rnnt.loss.results import Bounds
from pruned_rnnt.ops.common.row_geometry import LatticeRows
from pruned_rnnt.ops.common.utterances import Utterances
from pruned_rnnt.ops.joiner.row_loss import LossOptions, is_in_place, row_loss


def rnnt_loss(
    logits: Tensor,
    targets: Tensor,
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
    """Transducer loss -log P(targets | logits), Graves arXiv 1211.3711.

    Args:
        logits: (N, T, U+1, V), float64, float32, float16 or bfloat16; or packed,
            (sum T_n (U_n+1), V): the rows of each utterance's own lattice, frame by frame, one
            utterance after the other (packed_row_splits). Log-probabilities, with from_log_probs.
        targets: (N, U) integers in 0..V-1, not the blank; padding may have any values.
        logit_lengths, target_lengths: (N,) integers, on the device of logits or the CPU. The
            default is T and U; packed logits need logit_lengths.
        blank: column of the blank; negative counts from the end.
        rnnt_type: `regular`: any number of symbols a frame. `modified`: one at most, and a frame
            emits a symbol or a blank. `constrained`: as modified, a symbol followed by the blank of
            the same frame. `rna`: as modified, the last frame emits a blank.
        from_log_probs: do not normalise.
        delay_penalty: d adds d ((T_n - 1)/2 - t) to the log-probability of a symbol at frame t:
            above 0 favours early symbols.
        fastemit_lambda: f scales the gradient through symbols by 1 + f; the loss stays (FastEmit,
            arXiv 2010.11148).
        clamp: bound of each element of d loss_n / d logits, applied before the incoming gradient.
        hat: blank is a Bernoulli variable, symbols share the rest (HAT, arXiv 2003.07705).
        reduction: `none`, `mean` (over utterances) or `sum`.
        in_place: write the gradient over the logits, which saves as much memory as they take;
            logits must not be used after the backward pass.
        validate: on other devices than the CPU, synchronize and check values as on the CPU.

    Returns:
        (N,) or a scalar; float64 for float64 logits, else float32.

    Raises:
        TypeError: an argument that must be a tensor and is not.
        ValueError: names the argument that does not fit. Values (lengths, targets, an utterance
            without a path) are checked on the CPU or with validate; otherwise the loss of such an
            utterance is +inf and its gradient 0.
    """
    V = check_logits(logits, "U+1", in_place)
    checks.check_reduction(reduction)
    options = checks.check_options(
        blank, V, rnnt_type, delay_penalty, fastemit_lambda, clamp, hat, from_log_probs
    )
    batch = (targets, logit_lengths, target_lengths)
    return loss_of_logits(logits, batch, None, options, in_place, validate, reduction)


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
    """Transducer loss over the paths that stay inside a band (arXiv 2206.13236).

    Args:
        logits: (N, T, S, V), column j of frame t standing for bounds.start[n, t] + j; or packed,
            (sum T_n S, V): the frames of each utterance, one utterance after the other.
        bounds: of prune_bounds; start (N, T).
        others: as of rnnt_loss.

    Returns:
        (N,) or a scalar; float64 for float64 logits, else float32.

    Raises:
        TypeError, ValueError: as rnnt_loss, and a band without a path.
    """
    V = check_logits(logits, "S", in_place)
    check_bounds_type(bounds)
    checks.check_reduction(reduction)
    options = checks.check_options(
        blank, V, rnnt_type, delay_penalty, fastemit_lambda, clamp, hat, from_log_probs
    )
    batch = (targets, logit_lengths, target_lengths)
    return loss_of_logits(logits, batch, bounds, options, in_place, validate, reduction)


def check_logits(logits: Tensor, columns: str, in_place: bool) -> int:
    """V of logits of four dimensions, the third of which is `columns` in words, or packed."""
    checks.check_tensor("logits", logits)
    shape = f"(N, T, {columns}, V) or packed (rows, V)"
    checks.check_floating("logits", logits, shape, 2 if logits.dim() == 2 else 4)
    checks.check_last_axis("logits", logits)
    if in_place and (not logits.is_contiguous() or logits.is_neg()):
        raise ValueError("in_place=True needs contiguous logits without a deferred change of sign")
    return logits.shape[-1]


def loss_of_logits(
    logits: Tensor,
    batch: tuple[Tensor, Tensor | None, Tensor | None],
    bounds: Bounds | None,
    options: LossOptions,
    in_place: bool,
    validate: bool,
    reduction: str = "none",
) -> Tensor:
    """(N,) or reduced, over the whole lattice or inside bounds; batch: targets and lengths,
    unchecked."""
    utterances, rows = rows_of_logits(logits, batch, bounds, options, validate)
    flat = logits.contiguous().view(-1, logits.shape[-1])
    in_place = is_in_place(in_place)
    return row_loss(flat, utterances.targets, rows, options, in_place, reduction)


def rows_of_logits(
    logits: Tensor,
    batch: tuple[Tensor, Tensor | None, Tensor | None],
    bounds: Bounds | None,
    options: LossOptions,
    validate: bool,
) -> tuple[Utterances, LatticeRows]:
    """The checked batch, on the device, and the geometry of padded or packed logits."""
    packed, vocabulary = logits.dim() == 2, logits.shape[-1]
    sizes = checks.Sizes(None, None, None, vocabulary, logits.device, "logits")
    if not packed:
        size, frames, columns, _ = logits.shape
        symbols = columns - 1 if bounds is None else None
        sizes = sizes._replace(batch=size, frames=frames, symbols=symbols)
        if bounds is not None:
            shape = (size, frames, bounds.s_range, vocabulary)
            checks.check_shape("logits", logits, shape, "(N, T, S, V) with bounds.s_range for S")
    checked = checks.check_batch(*batch, sizes, options, validate)
    if bounds is not None:
        bounds = check_bounds(bounds, checked, sizes.frames, options.rnnt_type, validate)
    if packed:
        return given_packed_rows(checked, bounds, logits.shape[0], validate)
    utterances = checked.on_device()
    start = None if bounds is None else bounds.start
    return utterances, LatticeRows(*utterances.lengths, start, None, *logits.shape[1:3])
