"""Joiner and transducer loss in one call, without ever storing all logits.

Axes: N batch, T frames, U symbols, S columns kept a frame, D joiner dim, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from pruned_rnnt.loss.bounds import check_bounds, check_bounds_type
from pruned_rnnt.loss.checks import (
    check_floating,
    check_options,
    check_same,
    check_shape,
    check_utterances,
)
from pruned_rnnt.loss.results import Bounds
from pruned_rnnt.ops.common.reduction import reduced
from pruned_rnnt.ops.joiner.fused_joiner import joiner_loss
from pruned_rnnt.ops.joiner.joiner_rows import ACTIVATIONS


def rnnt_loss_fused(
    am: Tensor,
    lm: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    bounds: Bounds | None,
    logit_lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    *,
    activation: str = "tanh",
    blank: int = 0,
    rnnt_type: str = "regular",
    delay_penalty: float = 0.0,
    fastemit_lambda: float = 0.0,
    clamp: float | None = None,
    hat: bool = False,
    reduction: str = "mean",
    validate: bool = False,
) -> Tensor:
    """Loss of the logits act(am(t) + lm(u)) weight^T + bias, inside a band or everywhere.

    The same number as rnnt_loss_pruned (or rnnt_loss) of those logits, which exist only a chunk at
    a time and are computed again in the backward pass. Lengths on the CPU let padding be left out
    of all products; lengths elsewhere are never waited for. Under autocast the products run in
    its dtype.

    Args:
        am: (N, T, D) and lm: (N, U+1, D), the joiner's projected inputs.
        weight: (V, D) and bias: (V,) or None, its output layer.
        bounds: of prune_bounds, or None for the whole lattice.
        activation: `tanh`, `relu` or `none`.
        others: as of rnnt_loss.

    Returns:
        (N,) or a scalar; float64 for float64 inputs, else float32.

    Raises:
        TypeError, ValueError: as rnnt_loss and rnnt_loss_pruned.
    """
    check_floating("am", am, "(N, T, D)", 3)
    check_floating("lm", lm, "(N, U+1, D)", 3)
    check_floating("weight", weight, "(V, D)", 2)
    batch, frames, width = am.shape
    check_shape("lm", lm, (batch, max(lm.shape[1], 1), width), "(N, U+1, D) by the shape of am")
    check_shape("weight", weight, (weight.shape[0], width), "(V, D) with the D of am")
    if bias is not None:
        check_floating("bias", bias, "(V,)", 1)
    if bounds is not None:
        check_bounds_type(bounds)
    for name, x in (("lm", lm), ("weight", weight), ("bias", bias)):
        if x is not None:
            check_same(name, x, "am", am)
    if bias is not None:
        check_shape("bias", bias, (weight.shape[0],), "(V,)")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; it must be one of {list(ACTIVATIONS)}")
    options = check_options(
        blank=blank,
        vocabulary=weight.shape[0],
        rnnt_type=rnnt_type,
        reduction=reduction,
        delay_penalty=delay_penalty,
        fastemit_lambda=fastemit_lambda,
        clamp=clamp,
        hat=hat,
    )
    utterances = check_utterances(
        targets,
        logit_lengths,
        target_lengths,
        batch=batch,
        frames=frames,
        symbols=lm.shape[1] - 1,
        vocabulary=weight.shape[0],
        blank=options.blank,
        rnnt_type=options.rnnt_type,
        device=am.device,
        validate=validate,
        source="am and lm",
    )
    if bounds is not None:
        bounds = check_bounds(bounds, utterances, frames, options.rnnt_type, validate)
    loss = joiner_loss(
        am,
        lm,
        weight,
        bias,
        utterances,
        start=None if bounds is None else bounds.start,
        columns=lm.shape[1] if bounds is None else bounds.s_range,
        activation=ACTIVATIONS[activation],
        options=options,
    )
    return reduced(loss, reduction)
