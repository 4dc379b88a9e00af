"""Joiner and TDT loss in one call, which never stores the logits of all tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pruned_rnnt.loss import checks
from pruned_rnnt.loss.bounds import check_bounds, check_bounds_type
from pruned_rnnt.loss.fused import check_output_layer
from pruned_rnnt.loss.results import Bounds, reduced
from pruned_rnnt.loss.tdt_checks import check_durations, check_tdt_options, check_tdt_paths
from pruned_rnnt.ops.joiner.fused_tdt import OutputLayers, tdt_joiner_loss
from pruned_rnnt.ops.joiner.joiner_rows import ACTIVATIONS


def rnnt_loss_tdt_fused(
    am: Tensor,
    lm: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    duration_weight: Tensor,
    duration_bias: Tensor | None,
    targets: Tensor,
    bounds: Bounds | None,
    logit_lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    *,
    durations: Sequence[int] = (0, 1, 2, 3, 4),
    sigma: float = 0.0,
    omega: float = 0.0,
    activation: str = "tanh",
    blank: int = 0,
    delay_penalty: float = 0.0,
    fastemit_lambda: float = 0.0,
    clamp: float | None = None,
    reduction: str = "mean",
    validate: bool = False,
) -> Tensor:
    """TDT loss (arXiv 2304.06795) of a joiner's logits, inside a band or everywhere.

    With h = act(am(t) + lm(u)), equals rnnt_loss_tdt of the logits h weight^T + bias and the
    duration logits h duration_weight^T + duration_bias. Only one chunk of the former is stored at a
    time, and the backward pass computes it again; see rnnt_loss_fused.

    Args:
        am: (N, T, D) and lm: (N, U+1, D), the joiner's projected inputs.
        weight: (V, D) and bias: (V,) or None, its output layer.
        duration_weight: (K, D) and duration_bias: (K,) or None, that of the K durations.
        bounds: of prune_bounds_tdt, or None for the whole lattice.
        others: as of rnnt_loss_fused and rnnt_loss_tdt.

    Returns:
        (N,) or a scalar, as of rnnt_loss_fused.

    Raises:
        TypeError, ValueError: as rnnt_loss_tdt.
    """
    sizes = checks.check_am_lm(am, lm, "D")
    check_output_layer("", weight, bias, "V", am)
    check_output_layer("duration_", duration_weight, duration_bias, "K", am)
    sizes = sizes._replace(vocabulary=weight.shape[0])
    found = check_durations(durations)
    shape, meaning = (len(found), am.shape[2]), "(K, D) with one row for each of durations"
    checks.check_shape("duration_weight", duration_weight, shape, meaning)
    if bounds is not None:
        check_bounds_type(bounds)
    checks.check_one_of("activation", activation, ACTIVATIONS)
    checks.check_reduction(reduction)
    options = checks.check_options(
        blank, sizes.vocabulary, "regular", delay_penalty, fastemit_lambda, clamp
    )
    tdt_options = check_tdt_options(options, found, sigma, omega, am.device)
    batch = (targets, logit_lengths, target_lengths)
    utterances = checks.check_batch(*batch, sizes, options, validate)
    check_tdt_paths(checks.known_lengths(utterances, validate), found)
    if bounds is not None:
        bounds = check_bounds(bounds, utterances, sizes.frames, options.rnnt_type, validate)
    loss = tdt_joiner_loss(
        am,
        lm,
        OutputLayers(weight, bias, duration_weight, duration_bias),
        utterances,
        start=None if bounds is None else bounds.start,
        columns=lm.shape[1] if bounds is None else bounds.s_range,
        activation=ACTIVATIONS[activation],
        options=tdt_options,
    )
    return reduced(loss, reduction)
