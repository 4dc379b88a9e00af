"""The RNN-T loss of Hugging Face transformers' `ParakeetForRNNT`, without torchaudio.

    from pruned_rnnt.compat import transformers_loss

    transformers_loss.register()         # for all models, or: transformers_loss.use(model)

Only RNN-T: `ParakeetForTDT` keeps its own loss. transformers is imported by `register` alone.

Axes: N batch, T frames, U symbols, V vocabulary with blank.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch import Tensor

import pruned_rnnt
from pruned_rnnt.compat.argument_names import named_as
from pruned_rnnt.loss.checks import check_integers

REDUCTIONS = ("mean_volume", "mean_batch", "mean", "sum", "none")
_LOSS_TYPE = "ParakeetForRNNT"
_NO_TDT = (
    "this module replaces RNN-T losses only; the TDT loss (token-and-duration transducer, "
    "pruned_rnnt.rnnt_loss_tdt) is not available here yet, so leave the model's own TDT loss in "
    "place"
)


@named_as({"blank": "blank_token_id"})
def rnnt_loss(
    logits: Tensor,
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
        logits: (N, T, U + 1, V); float32, float64, float16 or bfloat16, used as they are.
        targets: (N, U) integers; padding may have any values.
        logit_lengths, target_lengths: (N,) integers.
        blank_token_id: column of the blank.
        reduction: `mean_volume`: sum of the losses over sum of target_lengths; `mean_batch`: mean
            over utterances; `mean`: each loss over its target length, then the mean over
            utterances (an utterance without symbols makes it inf, as in transformers); `sum`;
            `none`.
        fastemit_lambda, clamp, delay_penalty: as of `pruned_rnnt.rnnt_loss`; transformers has
            none of them.

    Returns:
        (N,) for reduction `none`, else a scalar; float64 for float64 logits, else float32.

    Raises:
        ValueError: an unknown reduction, and as `pruned_rnnt.rnnt_loss`.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; it must be one of {REDUCTIONS}")
    check_integers("target_lengths", target_lengths)
    each = pruned_rnnt.rnnt_loss(
        logits,
        targets,
        logit_lengths,
        target_lengths,
        blank=blank_token_id,
        fastemit_lambda=fastemit_lambda,
        clamp=clamp,
        delay_penalty=delay_penalty,
        reduction="none",
    )
    symbols = target_lengths.to(each)
    if reduction == "mean_volume":
        return each.sum() / symbols.sum()
    if reduction == "mean_batch":
        return each.mean()
    if reduction == "mean":
        return (each / symbols).mean()
    if reduction == "sum":
        return each.sum()
    return each


def parakeet_rnnt_loss(**arguments: Any) -> Tensor:
    """The `loss_function` of `ParakeetForRNNT`; replaces `ParakeetForRNNTLoss`.

    Args:
        arguments: logits, labels, logit_lengths, label_lengths, blank_token_id and optionally
            reduction, fastemit_lambda, clamp, delay_penalty, as of `rnnt_loss`. Others that
            transformers passes to every loss (`num_items_in_batch`) are ignored, as there.

    Raises:
        ValueError: the arguments are those of a TDT loss or of another kind of loss, and as
            `rnnt_loss`.
    """
    if "duration_logits" in arguments:
        raise ValueError(f"duration_logits is given: {_NO_TDT}")
    needed = ("logits", "labels", "logit_lengths", "label_lengths", "blank_token_id")
    missing = [name for name in needed if name not in arguments]
    if missing:
        raise ValueError(
            f"the model calls its loss function without {', '.join(missing)}; parakeet_rnnt_loss "
            "is for models that call it as ParakeetForRNNT does"
        )
    logits, targets, logit_lengths, target_lengths, blank = (arguments[name] for name in needed)
    optional = ("reduction", "fastemit_lambda", "clamp", "delay_penalty")
    return rnnt_loss(
        logits,
        targets.to(logits.device),
        logit_lengths,
        target_lengths,
        blank,
        **{name: arguments[name] for name in optional if name in arguments},
    )


def register(**options: Any) -> None:
    """Make every `ParakeetForRNNT`, built before or after, compute its loss with pruned_rnnt.

    Args:
        options: reduction, fastemit_lambda, clamp, delay_penalty of `rnnt_loss`, for all models.

    Raises:
        ImportError: transformers is not installed, or has no RNN-T loss.
        ValueError: an unknown option.
    """
    loss = _with_options(options)
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
    loss_utils.LOSS_MAPPING[_LOSS_TYPE] = loss


def use(model: Any, **options: Any) -> None:
    """Make one model compute its loss with pruned_rnnt.

    Args:
        model: a `ParakeetForRNNT`, or another model that calls its loss function as that does.
        options: as of `register`.

    Raises:
        ValueError: a TDT model, or an unknown option.
    """
    if getattr(getattr(model, "config", None), "durations", None) is not None:
        raise ValueError(f"model is a {type(model).__name__}: {_NO_TDT}")
    model.loss_function = _with_options(options)


def _with_options(options: dict[str, Any]) -> Any:
    known = ("reduction", "fastemit_lambda", "clamp", "delay_penalty")
    for name in options:
        if name not in known:
            raise ValueError(
                f"{name!r} is not an option of the RNN-T loss; it must be one of {known}"
            )
    return functools.partial(parakeet_rnnt_loss, **options)
