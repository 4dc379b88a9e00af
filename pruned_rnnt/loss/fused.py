"""Joiner and transducer loss in one call, without ever storing all logits.

Axes: N batch, T frames, U symbols, S columns kept a frame, D joiner dim, V vocabulary.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from pruned_rnnt.loss.bounds import check_bounds, check_bounds_type
from pruned_rnnt.loss.checks import (
    check_floating,
    check_options,
    check_same,
    check_shape,
    check_utterances,
    reduced,
)
from pruned_rnnt.loss.packing import own_rows
from pruned_rnnt.loss.results import Bounds
from pruned_rnnt.ops.common.row_geometry import RowGeometry
from pruned_rnnt.ops.common.utterances import Utterances
from pruned_rnnt.ops.joiner.fused_joiner import (
    ChunkPlan,
    chunk_plan,
    fused_loss,
    padded_output,
)
from pruned_rnnt.ops.joiner.fused_log_probs import JoinerInputs
from pruned_rnnt.ops.joiner.joiner_rows import ACTIVATIONS
from pruned_rnnt.ops.joiner.row_loss import LossOptions


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
    loss = checked_fused_loss(am, lm, weight, bias, utterances, bounds, activation, options)
    return reduced(loss, reduction)


def checked_fused_loss(
    am: Tensor,
    lm: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    utterances: Utterances,
    bounds: Bounds | None,
    activation: str,
    options: LossOptions,
) -> Tensor:
    """rnnt_loss_fused of checked arguments, (N,)."""
    dtype = product_dtype(am, lm, weight)
    am, lm, weight = (x.to(dtype).contiguous() for x in (am, lm, weight))
    bias = None if bias is None else bias.to(dtype)
    geometry, rows = own_rows(utterances, bounds, am.shape[1])
    weight_padded, bias_padded = padded_output(weight, bias)
    plan = joiner_plan(
        geometry,
        rows,
        weight_padded,
        utterances if bounds is None else None,
        vocabulary=weight.shape[0],
        activation=activation,
        options=options,
    )
    lengths = (utterances.logit_lengths, utterances.target_lengths)
    where = (utterances.targets, *lengths, *geometry[:2])
    return fused_loss(JoinerInputs(am, lm, weight_padded, bias_padded, *where), plan)


def joiner_plan(
    geometry: RowGeometry,
    rows: int,
    weight: Tensor,
    whole: Utterances | None,
    *,
    vocabulary: int,
    activation: str,
    options: LossOptions,
) -> ChunkPlan:
    """chunk_plan for an output layer (V', D); whole: of a whole lattice, None for a band."""
    packed = whole is not None and geometry.row_splits is not None
    return chunk_plan(
        geometry,
        rows,
        logit_bytes=weight.shape[0] * weight.element_size(),
        hidden_bytes=weight.shape[1] * weight.element_size(),
        host_lengths=whole.host_lengths if packed and whole is not None else None,
        vocabulary=vocabulary,
        activation=ACTIVATIONS[activation],
        options=options,
    )


def product_dtype(*factors: Tensor) -> torch.dtype:
    """The dtype of products of these: autocast's, or the widest of theirs."""
    device = factors[0].device.type
    if torch.is_autocast_enabled(device) and factors[0].dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return reduce(torch.promote_types, [x.dtype for x in factors])
