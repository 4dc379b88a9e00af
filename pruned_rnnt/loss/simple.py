"""The loss of the trivial joiner, whose occupancy chooses the band.

Axes: N batch, T frames, U symbols, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.loss.checks import (
    check_blank,
    check_finite,
    check_floating,
    check_reduction,
    check_rnnt_type,
    check_same,
    check_utterances,
)
from pruned_rnnt.loss.results import Occupancy, SimpleLoss
from pruned_rnnt.ops.common.reduction import reduced
from pruned_rnnt.ops.common.utterances import Utterances
from pruned_rnnt.ops.simple.simple_loss import SimpleOptions, simple_loss


def rnnt_loss_simple(
    am: Tensor,
    lm: Tensor,
    targets: Tensor,
    logit_lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    *,
    blank: int = 0,
    lm_only_scale: float = 0.0,
    am_only_scale: float = 0.0,
    rnnt_type: str = "regular",
    delay_penalty: float = 0.0,
    fastemit_lambda: float = 0.0,
    reduction: str = "mean",
    validate: bool = False,
) -> SimpleLoss:
    """Transducer loss of the logits am(t) + lm(u), without making them (arXiv 2206.13236).

    With l, a the two scales, log-probabilities are
    (1 - l - a) log_softmax(am(t) + lm(u)) + l log_softmax(lm(u)) + a log_softmax(am(t) + log q),
    where q is the mean of softmax(lm) over the batch's real positions. Right at any range of am
    and lm.

    Args:
        am: (N, T, V) and lm: (N, U+1, V), float64, float32, float16 or bfloat16, unnormalised.
        lm_only_scale, am_only_scale: l and a, at least 0 and together at most 1.
        others: as of rnnt_loss.

    Returns:
        SimpleLoss: loss (N,) or a scalar, and the occupancy; float64 for float64 inputs, else
        float32.

    Raises:
        TypeError, ValueError: as rnnt_loss.
    """
    check_floating("am", am, "(N, T, V)", 3)
    check_floating("lm", lm, "(N, U+1, V)", 3)
    check_same("lm", lm, "am", am)
    batch, frames, vocabulary = am.shape
    if lm.shape[0] != batch or lm.shape[2] != vocabulary or lm.shape[1] < 1:
        raise ValueError(
            f"lm has shape {tuple(lm.shape)}; it must be (N, U+1, V) = ({batch}, U+1, "
            f"{vocabulary}) by the shape of am"
        )
    options = check_simple_options(
        blank=blank,
        vocabulary=vocabulary,
        rnnt_type=rnnt_type,
        lm_only_scale=lm_only_scale,
        am_only_scale=am_only_scale,
        delay_penalty=delay_penalty,
        fastemit_lambda=fastemit_lambda,
    )
    check_reduction(reduction)
    utterances = check_utterances(
        targets,
        logit_lengths,
        target_lengths,
        batch=batch,
        frames=frames,
        symbols=lm.shape[1] - 1,
        vocabulary=vocabulary,
        blank=options.blank,
        rnnt_type=options.rnnt_type,
        device=am.device,
        validate=validate,
        source="am and lm",
    )
    loss, occupancy = checked_simple_loss(am, lm, utterances, options)
    return SimpleLoss(reduced(loss, reduction), occupancy)


def check_simple_options(
    *,
    blank: int,
    vocabulary: int,
    rnnt_type: str,
    lm_only_scale: float,
    am_only_scale: float,
    delay_penalty: float,
    fastemit_lambda: float,
) -> SimpleOptions:
    """The scalar arguments of the simple loss."""
    if not (lm_only_scale >= 0 and am_only_scale >= 0 and lm_only_scale + am_only_scale <= 1):
        raise ValueError(
            f"lm_only_scale is {lm_only_scale} and am_only_scale {am_only_scale}; they must be at "
            "least 0 and together at most 1"
        )
    return SimpleOptions(
        blank=check_blank(blank, vocabulary),
        rnnt_type=check_rnnt_type(rnnt_type),
        lm_only_scale=float(lm_only_scale),
        am_only_scale=float(am_only_scale),
        delay_penalty=check_finite("delay_penalty", delay_penalty),
        fastemit_lambda=check_finite("fastemit_lambda", fastemit_lambda),
    )


def checked_simple_loss(
    am: Tensor, lm: Tensor, utterances: Utterances, options: SimpleOptions
) -> SimpleLoss:
    """rnnt_loss_simple of checked arguments, without reduction."""
    dtype = torch.promote_types(am.dtype, lm.dtype)
    loss, emit, blank = simple_loss(
        am.to(dtype).contiguous(),
        lm.to(dtype).contiguous(),
        utterances.targets,
        utterances.logit_lengths,
        utterances.target_lengths,
        options,
    )
    return SimpleLoss(loss, Occupancy(emit, blank))
