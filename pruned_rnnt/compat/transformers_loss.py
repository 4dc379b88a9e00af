"""The losses of Hugging Face transformers' `ParakeetForRNNT` and `ParakeetForTDT`.

    from pruned_rnnt.compat import transformers_loss

    transformers_loss.register()         # for all models, or: transformers_loss.use(model)

torchaudio is not needed. Both losses are the exact ones, of the whole lattice. With
`use(model, fused=True)` they do not store the joint's logits in training, and with
`use(model, pruned=PrunedOptions())` training uses the pruned loss. transformers is imported by
`register`, and by `use` with one of these.

Axes: N batch, T frames, U symbols, V vocabulary with blank, K durations.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pruned_rnnt.compat import joint_inputs
from pruned_rnnt.compat.joint_inputs import JointInputs
from pruned_rnnt.compat.package_names import named_as
from pruned_rnnt.compat.pruned_joint import PrunedOptions, check_supported
from pruned_rnnt.loss.checks import check_flag, check_integers, check_tensor
from pruned_rnnt.loss.durations import check_durations

REDUCTIONS = ("mean_volume", "mean_batch", "mean", "sum", "none")
_LOSS_TYPE, _TDT_LOSS_TYPE = "ParakeetForRNNT", "ParakeetForTDT"
_OPTIONS = ("reduction", "fastemit_lambda", "clamp", "delay_penalty")
_TDT_OPTIONS = (*_OPTIONS, "sigma", "omega")


@named_as({"blank": "blank_token_id"})
def rnnt_loss(
    logits: Tensor | JointInputs,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank_token_id: int,
    reduction: str = "mean_volume",
    *,
    fastemit_lambda: float = 0.0,
    clamp: float | None = None,
    delay_penalty: float = 0.0,
) -> Tensor:
    """`transformers.loss.loss_rnnt.rnnt_loss`.

    Args:
        logits: (N, T, U + 1, V); float32, float64, float16 or bfloat16, used as they are; or the
            inputs of the joint in their place.
        targets: (N, U) integers; padding may have any values.
        logit_lengths, target_lengths: (N,) integers.
        blank_token_id: column of the blank.
        reduction: `mean_volume`: sum of the losses over sum of target_lengths; `mean_batch`: mean
            over utterances; `mean`: each loss over its target length, then the mean over
            utterances; `sum`; `none`. No symbols count as one, where transformers divides by 0.
        fastemit_lambda, clamp, delay_penalty: see `pruned_rnnt.rnnt_loss`; transformers has
            none of them.

    Returns:
        (N,) for reduction `none`, else a scalar; float64 for float64 logits, else float32.

    Raises:
        ValueError: an unknown reduction, and as `pruned_rnnt.rnnt_loss`.
    """
    _check(reduction, target_lengths)
    batch = (targets, logit_lengths, target_lengths)
    options: dict[str, Any] = {
        "blank": blank_token_id,
        "fastemit_lambda": fastemit_lambda,
        "clamp": clamp,
        "delay_penalty": delay_penalty,
        "reduction": "none",
    }
    each = joint_inputs.rnnt_loss(logits, *batch, **options)
    return _reduced(each, target_lengths, reduction)


@named_as({"blank": "blank_token_id", "logits": "token_logits"})
def tdt_loss(
    token_logits: Tensor | JointInputs,
    duration_logits: Tensor | JointInputs,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank_token_id: int,
    durations: Sequence[int],
    sigma: float = 0.0,
    reduction: str = "mean",
    *,
    omega: float = 0.0,
    fastemit_lambda: float = 0.0,
    clamp: float | None = None,
    delay_penalty: float = 0.0,
) -> Tensor:
    """`transformers.loss.loss_tdt.tdt_loss`.

    Args:
        token_logits: (N, T, U + 1, V); float32, float64, float16 or bfloat16, used as they are; or
            the inputs of the joint in their place, then also of duration_logits.
        duration_logits: (N, T, U + 1, K).
        durations: of the K columns.
        sigma, omega: see `pruned_rnnt.rnnt_loss_tdt`; transformers has no omega.
        Remaining arguments: see `rnnt_loss`.

    Returns:
        (N,) for reduction `none`, else a scalar; float64 for float64 logits, else float32.

    Raises:
        ValueError: an unknown reduction, and as `pruned_rnnt.rnnt_loss_tdt`.
    """
    _check(reduction, target_lengths)
    batch = (targets, logit_lengths, target_lengths)
    options: dict[str, Any] = {
        "durations": check_durations(durations),
        "sigma": sigma,
        "omega": omega,
        "blank": blank_token_id,
        "fastemit_lambda": fastemit_lambda,
        "clamp": clamp,
        "delay_penalty": delay_penalty,
        "reduction": "none",
    }
    each = joint_inputs.rnnt_loss_tdt(token_logits, duration_logits, *batch, **options)
    return _reduced(each, target_lengths, reduction)


def _check(reduction: str, target_lengths: Tensor) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; it must be one of {REDUCTIONS}")
    check_integers("target_lengths", target_lengths)


def _reduced(each: Tensor, target_lengths: Tensor, reduction: str) -> Tensor:
    """The reduction of the losses (N,), as transformers has it."""
    symbols = target_lengths.to(each)
    if reduction == "mean_volume":
        return each.sum() / symbols.sum().clamp_min(1)
    if reduction == "mean_batch":
        return each.mean()
    if reduction == "mean":
        return (each / symbols.clamp_min(1)).mean()
    if reduction == "sum":
        return each.sum()
    return each


_in_names_of_models = named_as({"targets": "labels", "target_lengths": "label_lengths"})


@_in_names_of_models
def parakeet_rnnt_loss(**arguments: Any) -> Tensor:
    """The `loss_function` of `ParakeetForRNNT`; replaces `ParakeetForRNNTLoss`.

    Args:
        arguments: logits, labels, logit_lengths, label_lengths, blank_token_id and optionally
            reduction, fastemit_lambda, clamp, delay_penalty: see `rnnt_loss`. Labels of -100 are
            padding, even if label_lengths counts them. Others that transformers passes to every
            loss (`num_items_in_batch`) are ignored, as there.

    Raises:
        ValueError: the arguments are those of a TDT loss or of another kind of loss, and as
            `rnnt_loss`.
    """
    if "duration_logits" in arguments:
        raise ValueError(
            "duration_logits is given, which an RNN-T loss would ignore: this model needs "
            "parakeet_tdt_loss, which register() and use(model) choose for it"
        )
    needed = ("logits", "labels", "logit_lengths", "label_lengths", "blank_token_id")
    logits, targets, logit_lengths, target_lengths, blank = _given(
        arguments, needed, "parakeet_rnnt_loss", _LOSS_TYPE
    )
    return rnnt_loss(
        logits,
        _beside(targets, logits),
        logit_lengths,
        _without_padding(target_lengths, targets),
        blank,
        **{name: arguments[name] for name in _OPTIONS if name in arguments},
    )


@_in_names_of_models
def parakeet_tdt_loss(**arguments: Any) -> Tensor:
    """The `loss_function` of `ParakeetForTDT`; replaces `ParakeetForTDTLoss`.

    Args:
        arguments: token_logits, duration_logits, labels, logit_lengths, label_lengths,
            blank_token_id, durations and optionally reduction, sigma, omega, fastemit_lambda,
            clamp, delay_penalty: see `tdt_loss`. For labels of -100 and other arguments see
            `parakeet_rnnt_loss`.

    Raises:
        ValueError: an argument is missing, and as `tdt_loss`.
    """
    lengths = ("logit_lengths", "label_lengths")
    needed = ("token_logits", "duration_logits", "labels", *lengths, "blank_token_id", "durations")
    logits, duration_logits, targets, logit_lengths, target_lengths, blank, durations = _given(
        arguments, needed, "parakeet_tdt_loss", _TDT_LOSS_TYPE
    )
    return tdt_loss(
        logits,
        duration_logits,
        _beside(targets, logits),
        logit_lengths,
        _without_padding(target_lengths, targets),
        blank,
        durations,
        **{name: arguments[name] for name in _TDT_OPTIONS if name in arguments},
    )


def _beside(labels: Tensor, logits: Tensor | JointInputs) -> Tensor:
    """The labels on the device of the logits, which the loss checks under their own name."""
    check_tensor("labels", labels)
    return labels.to(logits.device) if isinstance(logits, (Tensor, JointInputs)) else labels


def _without_padding(label_lengths: Tensor, labels: Tensor) -> Tensor:
    """label_lengths without labels of -100, with which the collators of transformers pad and which
    its models count."""
    check_integers("label_lengths", label_lengths)
    if label_lengths.shape != labels.shape[:-1]:
        return label_lengths  # The loss refuses them.
    return torch.minimum(label_lengths, (labels != -100).sum(-1).to(label_lengths))


def _given(
    arguments: Mapping[str, Any], needed: Sequence[str], loss: str, model: str
) -> tuple[Any, ...]:
    """The needed arguments; ValueError if some are missing."""
    missing = [name for name in needed if name not in arguments]
    if missing:
        raise ValueError(
            f"the model calls its loss function without {', '.join(missing)}; {loss} is for models "
            f"that call it as {model} does"
        )
    return tuple(arguments[name] for name in needed)


def register(**options: Any) -> None:
    """Make all models compute their loss with pruned_rnnt: `ParakeetForRNNT` and `ParakeetForTDT`.

    It does not matter if they are built before or after the call.

    Args:
        options: reduction, fastemit_lambda, clamp, delay_penalty of `rnnt_loss` and `tdt_loss`, for
            all models; sigma and omega, for those of TDT.

    Raises:
        ImportError: transformers is not installed, or has no RNN-T loss.
        ValueError: an unknown option.
    """
    _check_options(options, _TDT_OPTIONS, "TDT")
    try:
        loss_utils = importlib.import_module("transformers.loss.loss_utils")
    except ImportError as error:
        raise ImportError(
            f"transformers_loss.register() needs transformers, which could not be imported "
            f"({error}); install it with: pip install transformers"
        ) from error
    if _LOSS_TYPE not in loss_utils.LOSS_MAPPING:
        raise ImportError(
            f"this version of transformers has no {_LOSS_TYPE} loss to replace; install one that "
            f"has {_LOSS_TYPE} (tested with transformers 5.23)"
        )
    own = {name: value for name, value in options.items() if name in _OPTIONS}
    loss_utils.LOSS_MAPPING[_LOSS_TYPE] = functools.partial(parakeet_rnnt_loss, **own)
    if _TDT_LOSS_TYPE in loss_utils.LOSS_MAPPING:
        loss_utils.LOSS_MAPPING[_TDT_LOSS_TYPE] = functools.partial(parakeet_tdt_loss, **options)


def use(
    model: Any, *, fused: bool = False, pruned: PrunedOptions | None = None, **options: Any
) -> None:
    """Make one model compute its loss with pruned_rnnt.

    Args:
        model: a `ParakeetForRNNT` or `ParakeetForTDT`, or another model that calls its loss
            function as these do; no wrapper of it. A model with durations in its configuration
            gets the TDT loss.
        fused: do not store the joint's logits (N, T, U+1, V) in training. The output's `logits` is
            then a `JointInputs`; in eval mode it is the logits. Where hooks or adapters change the
            joint or its head, logits are stored, and a warning says so.
        pruned: train with the pruned loss, which stores no logits either; in eval mode the loss is
            the exact one. Each call makes new layers for the simple loss, in
            `model.joint.pruned_loss`: make the optimiser after it. A call without it removes them.
        options: see `register`; sigma and omega only for TDT.

    Raises:
        TypeError, ValueError: a model without a loss function of transformers; an unknown option;
            or with fused or pruned, a joint that is not one of these models'; or with pruned,
            clamp, or its options out of range.
    """
    check_flag("fused", fused)
    model = getattr(model, "_orig_mod", model)  # What torch.compile returns wraps it.
    # Wrappers have those of the model in `__getattr__` alone.
    own = getattr(model, "__dict__", {})
    if not (hasattr(type(model), "loss_function") or "loss_function" in own):
        raise TypeError(
            f"model is a {type(model).__name__}; it must be the model of transformers itself: "
            "model.module of DataParallel and DistributedDataParallel, model.get_base_model() of "
            "PEFT"
        )
    durations = getattr(getattr(model, "config", None), "durations", None)
    if durations is None:
        _check_options(options, _OPTIONS, "RNN-T")
    else:
        _check_options(options, _TDT_OPTIONS, "TDT")
    if pruned is not None:
        check_supported(options)
    # Without that module, no joint leaves logits out, and transformers need not be imported.
    if fused or pruned is not None or "pruned_rnnt.compat.transformers_joints" in sys.modules:
        importlib.import_module("pruned_rnnt.compat.transformers_joints").prepare(
            model, fused=fused, pruned=pruned, durations=durations
        )
    loss = parakeet_rnnt_loss if durations is None else parakeet_tdt_loss
    model.loss_function = functools.partial(loss, **options)


def _check_options(options: Mapping[str, Any], known: Sequence[str], loss: str) -> None:
    for name in options:
        if name not in known:
            raise ValueError(
                f"{name!r} is not an option of the {loss} loss; it must be one of {tuple(known)}"
            )
