"""The transducer loss of logits inside a band of the lattice.

Axes: N batch, T frames, U symbols, S columns kept a frame, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from pruned_rnnt.loss.bounds import check_bounds, check_bounds_type
from pruned_rnnt.loss.checks import (
    check_floating,
    check_options,
    check_shape,
    check_tensor,
    check_utterances,
)
from pruned_rnnt.loss.packing import given_packed_rows
from pruned_rnnt.loss.results import Bounds
from pruned_rnnt.ops.common.reduction import reduced
from pruned_rnnt.ops.common.row_geometry import RowGeometry
from pruned_rnnt.ops.joiner.row_loss import row_loss


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
    check_tensor("logits", logits)
    check_bounds_type(bounds)
    packed = logits.dim() == 2
    check_floating("logits", logits, "(N, T, S, V) or packed (rows, V)", 2 if packed else 4)
    vocabulary = logits.shape[-1]
    options = check_options(
        blank=blank,
        vocabulary=vocabulary,
        rnnt_type=rnnt_type,
        reduction=reduction,
        delay_penalty=delay_penalty,
        fastemit_lambda=fastemit_lambda,
        clamp=clamp,
        hat=hat,
        from_log_probs=from_log_probs,
    )
    if in_place and not logits.is_contiguous():
        raise ValueError("in_place=True needs contiguous logits")
    if not packed:
        batch, frames, _, _ = logits.shape
        shape = (batch, frames, bounds.s_range, vocabulary)
        check_shape("logits", logits, shape, "(N, T, S, V) with bounds.s_range for S")
    utterances = check_utterances(
        targets,
        logit_lengths,
        target_lengths,
        batch=None if packed else logits.shape[0],
        frames=None if packed else logits.shape[1],
        symbols=None,
        vocabulary=vocabulary,
        blank=options.blank,
        rnnt_type=options.rnnt_type,
        device=logits.device,
        validate=validate,
        source="logits",
    )
    bounds = check_bounds(
        bounds, utterances, None if packed else logits.shape[1], options.rnnt_type, validate
    )
    if packed:
        utterances, geometry = given_packed_rows(utterances, bounds, logits.shape[0], validate)
    else:
        geometry = RowGeometry(bounds.start, None, logits.shape[1], bounds.s_range)
    loss = row_loss(
        logits.contiguous().view(-1, vocabulary),
        utterances.targets,
        utterances.logit_lengths,
        utterances.target_lengths,
        geometry,
        options,
        in_place,
    )
    return reduced(loss, reduction)
