"""Joiner and transducer loss, of RNN-T or TDT, in one call, which never stores all logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from pruned_rnnt.loss import checks
from pruned_rnnt.loss.batch import Sizes, check_am_lm, check_batch
from pruned_rnnt.loss.bounds import check_bounds, check_bounds_type
from pruned_rnnt.loss.durations import check_durations, tdt_recursion
from pruned_rnnt.loss.results import Bounds, reduced
from pruned_rnnt.ops.joiner.fused_joiner import OutputLayers, joiner_loss, planned_joiner
from pruned_rnnt.ops.joiner.joiner_rows import ACTIVATIONS
from pruned_rnnt.ops.lattice.recursion import Recursion
from pruned_rnnt.ops.pruning.prune_bounds import clipped_width


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

    Equals rnnt_loss_pruned (or rnnt_loss) of those logits, of which only one chunk at a time is
    stored, and which the backward pass computes again. If both lengths are on the CPU, no product
    includes padding; lengths on other devices cause no synchronization. Under autocast the products
    run in its dtype.

    In bfloat16, logits and their gradients are rounded to it, as those of a joiner under autocast.
    That is nearly all of the error of the gradients, which grows with the range of the logits and
    as the loss falls: 2% to 6% (L2) in a model fitted until its loss was 0.04 to 0.002 an
    utterance. There, and on large whole lattices on CUDA, the backward pass also leaves out nodes
    that hardly any path visits, which was 0.02% to 0.6% of the gradients of that model.

    Args:
        am: (N, T, D) and lm: (N, U+1, D), the joiner's projected inputs.
        weight: (V, D) and bias: (V,) or None, its output layer.
        bounds: of prune_bounds, or None for the whole lattice.
        activation: `tanh`, `relu` or `none`.
        Remaining arguments: see rnnt_loss.

    Returns:
        (N,) or a scalar; float64 for float64 inputs, else float32.

    Raises:
        TypeError, ValueError: as rnnt_loss and rnnt_loss_pruned.
    """
    layers = OutputLayers(weight, bias)
    sizes = _check_layers(am, lm, layers)
    options = checks.check_options(
        blank, sizes.vocabulary, rnnt_type, delay_penalty, fastemit_lambda, clamp, hat
    )
    batch = (targets, logit_lengths, target_lengths)
    arguments = (am, lm, layers, sizes, batch, bounds, Recursion(options))
    return _fused_loss(*arguments, activation=activation, reduction=reduction, validate=validate)


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
        bounds: of prune_bounds, or None for the whole lattice.
        Remaining arguments: see rnnt_loss_fused and rnnt_loss_tdt.

    Returns:
        (N,) or a scalar; see rnnt_loss_fused.

    Raises:
        TypeError, ValueError: as rnnt_loss_tdt.
    """
    layers = OutputLayers(weight, bias, duration_weight, duration_bias)
    sizes = _check_layers(am, lm, layers, durations)
    options = checks.check_options(
        blank, sizes.vocabulary, "regular", delay_penalty, fastemit_lambda, clamp
    )
    recursion = tdt_recursion(options, durations, sigma, omega, am.device)
    batch = (targets, logit_lengths, target_lengths)
    arguments = (am, lm, layers, sizes, batch, bounds, recursion)
    return _fused_loss(*arguments, activation=activation, reduction=reduction, validate=validate)


def _fused_loss(
    am: Tensor,
    lm: Tensor,
    layers: OutputLayers,
    sizes: Sizes,
    batch: tuple[Tensor, Tensor | None, Tensor | None],
    bounds: Bounds | None,
    recursion: Recursion,
    *,
    activation: str,
    reduction: str,
    validate: bool,
) -> Tensor:
    checks.check_one_of("activation", activation, ACTIVATIONS)
    checks.check_reduction(reduction)
    if bounds is not None:
        check_bounds_type(bounds)
    utterances = check_batch(*batch, sizes, recursion, validate)
    if bounds is not None:
        bounds = check_bounds(bounds, utterances, sizes.frames, recursion, validate)
    planned = planned_joiner(
        am,
        lm,
        layers,
        utterances,
        start=None if bounds is None else bounds.start,
        columns=lm.shape[1] if bounds is None else clipped_width(bounds.s_range, lm.shape[1]),
        activation=ACTIVATIONS[activation],
        recursion=recursion,
    )
    return reduced(joiner_loss(*planned), reduction)


def _check_layers(
    am: Tensor, lm: Tensor, layers: OutputLayers, durations: Sequence[int] | None = None
) -> Sizes:
    """The sizes of am (N, T, D) and lm (N, U+1, D) and of output layers that fit them."""
    sizes = check_am_lm(am, lm, "D")
    _check_output_layer("", layers.weight, layers.bias, "V", am)
    if durations is not None:
        # The check below refuses None, which a caller may pass in spite of the type.
        weight, found = cast(Tensor, layers.duration_weight), check_durations(durations)
        _check_output_layer("duration_", weight, layers.duration_bias, "K", am)
        shape, meaning = (len(found), am.shape[2]), "(K, D) with one row for each of durations"
        checks.check_shape("duration_weight", weight, shape, meaning)
    return sizes._replace(vocabulary=layers.weight.shape[0])


def _check_output_layer(
    prefix: str, weight: Tensor, bias: Tensor | None, rows: str, am: Tensor
) -> None:
    """weight (rows, D) and bias (rows,) or None for am (N, T, D); their names begin with prefix."""
    name = f"{prefix}weight"
    checks.check_floating(name, weight, f"({rows}, D)", 2)
    count, width = weight.shape[0], am.shape[2]
    checks.check_shape(name, weight, (count, width), f"({rows}, D) with the D of am")
    checks.check_same(name, weight, "am", am)
    if bias is not None:
        name = f"{prefix}bias"
        checks.check_floating(name, bias, f"({rows},)", 1)
        checks.check_same(name, bias, "am", am)
        checks.check_shape(name, bias, (count,), f"({rows},)")
