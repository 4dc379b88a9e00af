"""The loss of the trivial joiner, whose occupancy chooses the band."""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.loss import checks
from pruned_rnnt.loss.batch import check_am_lm, check_batch
from pruned_rnnt.loss.results import Occupancy, SimpleLoss, reduced
from pruned_rnnt.ops.lattice.recursion import LossOptions, Recursion
from pruned_rnnt.ops.simple.simple_log_probs import Scales
from pruned_rnnt.ops.simple.simple_loss import SimpleInputs, SimpleOptions, simple_loss


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
    """Transducer loss of the logits am(t) + lm(u), which are never stored (arXiv 2206.13236).

    With l, a the two scales, log-probabilities are
    (1 - l - a) log_softmax(am(t) + lm(u)) + l log_softmax(lm(u)) + a log_softmax(am(t) + log q),
    where q is the mean of softmax(lm) over the batch's real positions. Peaks of am and lm may be
    any distance apart. Inputs other than float64 are normalised in float32: the relative error of
    probabilities is about 1.2e-7 times the size of the largest values of am(t) and lm(u). If these
    are in the thousands, subtract the maximum over V of each, which changes no softmax.

    Args:
        am: (N, T, V) and lm: (N, U+1, V), float64, float32, float16 or bfloat16, unnormalised.
        lm_only_scale, am_only_scale: l and a, at least 0 and together at most 1.
        Remaining arguments: see rnnt_loss.

    Returns:
        SimpleLoss: loss (N,) or a scalar, and the occupancy; float64 for float64 inputs, else
        float32.

    Raises:
        TypeError, ValueError: as rnnt_loss. An utterance whose loss is +inf because values are not
            read still counts in q, so that with am_only_scale its gradient is not 0.
    """
    sizes = check_am_lm(am, lm, "V")
    penalties = (delay_penalty, fastemit_lambda)
    options = checks.check_options(blank, sizes.vocabulary, rnnt_type, *penalties)
    simple_options = check_scales(options, lm_only_scale, am_only_scale)
    checks.check_reduction(reduction)
    batch = (targets, logit_lengths, target_lengths)
    recursion = simple_options.recursion
    checked = check_batch(*batch, sizes, recursion, validate)
    dtype = torch.promote_types(am.dtype, lm.dtype)
    inputs = SimpleInputs(am.to(dtype).contiguous(), lm.to(dtype).contiguous())
    loss, emit, blank_mass, *_ = simple_loss(inputs, checked.on_device().tensors, simple_options)
    return SimpleLoss(reduced(loss, reduction), Occupancy(emit, blank_mass))


def check_scales(options: LossOptions, lm_only_scale: float, am_only_scale: float) -> SimpleOptions:
    """The options of the simple loss, with its scales of smoothing."""
    scales = check_smoothing(lm_only_scale, am_only_scale)
    return SimpleOptions(Recursion(options), Scales(options.blank, *scales))


def check_smoothing(lm_only_scale: float, am_only_scale: float) -> tuple[float, float]:
    """Both as numbers, at least 0 and together at most 1."""
    lm_only_scale = checks.check_finite("lm_only_scale", lm_only_scale)
    am_only_scale = checks.check_finite("am_only_scale", am_only_scale)
    if not (lm_only_scale >= 0 and am_only_scale >= 0 and lm_only_scale + am_only_scale <= 1):
        raise ValueError(
            f"lm_only_scale is {lm_only_scale} and am_only_scale {am_only_scale}; they must be at "
            "least 0 and together at most 1"
        )
    return lm_only_scale, am_only_scale
