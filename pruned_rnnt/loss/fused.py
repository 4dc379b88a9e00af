"""Joiner and transducer loss in one call, which never stores all logits."""

from __future__ import annotations

from torch import Tensor

from pruned_rnnt.loss import checks
from pruned_rnnt.loss.bounds import check_bounds, check_bounds_type
from pruned_rnnt.loss.results import Bounds, reduced
from pruned_rnnt.ops.joiner.fused_joiner import joiner_loss, planned_joiner
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
        others: as of rnnt_loss.

    Returns:
        (N,) or a scalar; float64 for float64 inputs, else float32.

    Raises:
        TypeError, ValueError: as rnnt_loss and rnnt_loss_pruned.
    """
    sizes = checks.check_am_lm(am, lm, "D")
    check_output_layer("", weight, bias, "V", am)
    sizes = sizes._replace(vocabulary=weight.shape[0])
    if bounds is not None:
        check_bounds_type(bounds)
    checks.check_one_of("activation", activation, ACTIVATIONS)
    checks.check_reduction(reduction)
    options = checks.check_options(
        blank, sizes.vocabulary, rnnt_type, delay_penalty, fastemit_lambda, clamp, hat
    )
    batch = (targets, logit_lengths, target_lengths)
    utterances = checks.check_batch(*batch, sizes, options, validate)
    if bounds is not None:
        bounds = check_bounds(bounds, utterances, sizes.frames, options.rnnt_type, validate)
    planned = planned_joiner(
        am,
        lm,
        weight,
        bias,
        utterances,
        start=None if bounds is None else bounds.start,
        columns=lm.shape[1] if bounds is None else bounds.s_range,
        vocabulary=sizes.vocabulary,
        activation=ACTIVATIONS[activation],
        options=options,
        skips_rows=True,
    )
    return reduced(joiner_loss(*planned), reduction)


def check_output_layer(
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
